"""The dashboard asks for metrics that a coordinator serves."""

import json
import re
from pathlib import Path

from verl_mux.coordinator import prometheus

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "verl_mux.json"


def targets():
    return [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def asked(target):
    return re.findall(r"\bmux_\w+", target["expr"])


def test_every_panel_asks_for_metrics_that_are_served():
    names = {name for target in targets() for name in asked(target)}
    assert names <= prometheus.METRICS.keys() and len(names) >= 15


def test_no_panel_lies_upon_another():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    taken = [(x, y) for it in places for x in range(it["x"], it["x"] + it["w"]) for y in range(it["y"], it["y"] + it["h"])]
    assert len(taken) == len(set(taken)) and max(x for x, _ in taken) < 24
