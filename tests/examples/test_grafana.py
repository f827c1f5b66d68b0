"""The dashboard asks for metrics that the coordinator serves, with labels that they have."""

import json
import re
from pathlib import Path

from verl_mux.coordinator.prometheus_text import METRICS

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "verl_mux.json"


def test_every_panel_asks_for_metrics_that_are_served():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in re.findall(r"\bmux_\w+", target["expr"])}
    assert asked <= METRICS.keys() and len(asked) >= 15


def test_no_panel_lies_upon_another():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    taken = [(x, y) for it in places for x in range(it["x"], it["x"] + it["w"]) for y in range(it["y"], it["y"] + it["h"])]
    assert len(taken) == len(set(taken)) and max(x for x, _ in taken) < 24
