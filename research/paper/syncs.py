"""R6: the twelve bars of figure 12 from the model that the simulator counts with, whose four bandwidths were fitted to these very
bars; and the eight of 7B and 32B from the bars of 14B alone. Neither says anything of other links."""

from __future__ import annotations

import msgspec

from research.paper.figure import Figure
from research.paper.testbed import WEIGHTS_GB
from verl_mux.placement.estimator import LinkModel

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
# The stages of 14B's bars, read off the vector figure: both of 8 -> 8, and the broadcast of 16 -> 16 over two nodes.
SCATTER_S, BROADCAST_IN_S, BROADCAST_ACROSS_S = 1.54, 0.13, 5.03


def syncs() -> list[Figure]:
    """First with what all bars were fitted by, then with what those of 14B say."""
    weights = WEIGHTS_GB["14B"]
    link = LinkModel(
        scatter=weights / (8 * SCATTER_S),
        broadcast_in=weights / BROADCAST_IN_S,
        broadcast_across=weights / BROADCAST_ACROSS_S,
    )
    learnt = _bars(link, weights / BARS[8, "14B"][0], ["7B", "32B"])
    return [
        *(
            msgspec.structs.replace(figure, within=0.10, basis="fitted")
            for figure in _bars(LinkModel(), PULL, ["7B", "14B", "32B"])
        ),
        *(msgspec.structs.replace(figure, name=f"{figure.name}, from 14B's bars") for figure in learnt),
    ]


def _bars(link: LinkModel, pull: float, models: list[str]) -> list[Figure]:
    """pull: GB/s of one stream, in veRL's way."""
    found = []
    for (gpus, model), printed in BARS.items():
        if model in models:
            seconds = WEIGHTS_GB[model] / pull, link.two_stage_s(WEIGHTS_GB[model], gpus, gpus // 8)
            for system, paper, ours in zip(("veRL", "RollMux"), printed, seconds, strict=True):
                name = f"sync {model}, {gpus} -> {gpus} GPUs, {system}"
                found.append(Figure(claim="R6", name=name, paper=paper, ours=ours, unit="s"))
    return found
