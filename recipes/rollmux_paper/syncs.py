"""R6: the twelve bars of figure 12 from a model whose four bandwidths were fitted to these very bars: that they come out again
shows that four numbers describe twelve, and says nothing of other links."""

from __future__ import annotations

from recipes.rollmux_paper.figure import Figure
from recipes.rollmux_paper.testbed import WEIGHTS_GB
from verl_mux.scheduling.estimate.sync_time import LinkModel

# GB/s of one stream, when every rollout GPU fetches a whole copy over a stream of its own (veRL's way).
PULL = 16.0 / 8
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
    link = LinkModel()
    found = []
    for (gpus, model), (pull, two_stage) in BARS.items():
        weights = WEIGHTS_GB[model]
        both = (("veRL", pull, weights / PULL), ("RollMux", two_stage, link.two_stage_s(weights, gpus, gpus // 8)))
        for system, paper, ours in both:
            name = f"sync {model}, {gpus} -> {gpus} GPUs, {system}"
            found.append(Figure(claim="R6", name=name, paper=paper, ours=ours, unit="s", within=0.10))
    return found
