"""R6: the twelve bars of figure 12 from one link model of four bandwidths."""

from __future__ import annotations

from recipes.rollmux_paper.figure import Figure
from recipes.rollmux_paper.testbed import WEIGHTS_GB
from verl_mux.scheduling.synctime import LinkModel

# Seconds, as printed: (GPUs a side, model) -> (veRL, RollMux).
BARS = {
    (8, "7B"): (7.5, 0.9),
    (8, "14B"): (13.8, 1.7),
    (8, "32B"): (30.7, 3.9),
    (16, "7B"): (8.2, 3.1),
    (16, "14B"): (15.2, 5.8),
    (16, "32B"): (33.8, 12.3),
}


def syncs() -> list[Figure]:
    """One model for all bars: nothing is fitted to a single one."""
    link = LinkModel()
    found = []
    for (gpus, model), (pull, two_stage) in BARS.items():
        weights = WEIGHTS_GB[model]
        both = (("veRL", pull, link.pull_s(weights)), ("RollMux", two_stage, link.two_stage_s(weights, gpus, gpus // 8)))
        for system, paper, ours in both:
            name = f"sync {model}, {gpus} -> {gpus} GPUs, {system}"
            found.append(Figure(claim="R6", name=name, paper=paper, ours=ours, unit="s", within=0.10))
    return found
