"""The dashboard asks for metrics that a coordinator or `verl-mux top` serves, by labels that they have."""

import json
import re
from pathlib import Path

from verl_mux.coordinator import prometheus
from verl_mux.profiling.live import screen as metrics
from verl_mux.profiling.live.job_states import COUNTERS, Job, Replica, State

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "verl_mux.json"


def targets():
    return [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def asked(target):
    return re.findall(r"\bmux_\w+", target["expr"])


def busy_run():
    """A run that has a sample of every metric."""
    state = State(DASHBOARD.parent)
    figures = {"step_sec": 60.0, "reward": 0.5}
    state.jobs["a"] = Job("a", phase="train", nodes=("t0",), asks="rollout", nodes_of={"rollout": ("r0",)}, figures=figures)
    state.replicas["a", 0] = Replica("a", 0, node="r0", counters=dict.fromkeys(COUNTERS, 1.0))
    return state


def test_every_panel_asks_for_metrics_that_are_served():
    served = prometheus.METRICS.keys() | metrics.METRICS.keys()
    names = {name for target in targets() for name in asked(target)}
    assert names <= served and len(names & prometheus.METRICS.keys()) >= 15


def test_every_figure_of_a_run_but_whether_it_ended_has_a_place():
    names = {name for target in targets() for name in asked(target)}
    assert metrics.METRICS.keys() - names == {"mux_top_job_ended", "mux_top_replica_tokens"}


def test_legends_name_labels_that_a_runs_metrics_have():
    labels = {name: set(of) for name, of, value in metrics.samples(busy_run(), 0.0) if value is not None}
    assert labels.keys() == metrics.METRICS.keys()
    for target in targets():
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(wanted <= labels[name] for name in asked(target) if name in labels), target


def test_no_panel_lies_upon_another():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    taken = [(x, y) for it in places for x in range(it["x"], it["x"] + it["w"]) for y in range(it["y"], it["y"] + it["h"])]
    assert len(taken) == len(set(taken)) and max(x for x, _ in taken) < 24
