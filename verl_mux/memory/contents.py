"""What the tensors of a sleeping model held, and whether a sync has brought all of it back.

Runs in the scheduler processes of engines; called by each engine's folder; touches the model's tensors.

asleep at level 1: every parameter is on the host, and comes back on waking; its place there is kept for the next sleep.
asleep at level 2: parameters are dropped; on waking they are marked, and what a sync has not overwritten still carries its mark.
At both: tensors that no sync sends are on the host: plain attributes of modules (scales, tables), and parameters that cannot
carry a mark. Buffers are SGLang's to stash; of vLLM's models they are kept here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

import torch

from verl_mux.memory.arena import Arena

_CAN_BE_MARKED = (torch.float32, torch.bfloat16, torch.float16)
# (size, stride): a parameter of at most `size` numbers is marked by a NaN in every `stride`-th number. Strides above 1 are
# primes, so marks fall on different places of each row. A stride is smaller than any part that a loader fills by itself (an
# expert's half of a bias, the keys of merged projections).
_EVERY = ((1 << 16, 1), (1 << 22, 127))
# A NaN with bits that no computation makes, so that it is none that a sync sent.
_MARK = {torch.float32: 0x7FE5A5A5, torch.bfloat16: 0x7FE5, torch.float16: 0x7E5A}
_EVERY_OF_THE_LARGEST = 4093


class Contents:
    """Of one model in one process. `left` before its memory goes, `came_back` when it is there again, then `lacks`."""

    def __init__(self, model: torch.nn.Module, keeps_buffers: bool = False) -> None:
        self._model, self._keeps_buffers = model, keeps_buffers
        self._host = Arena("weights at level 1")
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._marked: list[tuple[str, torch.Tensor]] = []

    @torch.no_grad()
    def left(self, level: int) -> int:
        """Copies what must be kept to the host. Returns bytes."""
        if self._marked:  # still without their values: nothing to keep of them
            level = 2
        named = list(self._model.named_parameters())
        keep: dict[Hashable, torch.Tensor] = {n: p.data for n, p in named if level == 1 or p.dtype not in _CAN_BE_MARKED}
        keep |= {buffer: it.data for buffer, it in self._model.named_buffers()} if self._keeps_buffers else {}
        keep |= enumerate(self._plain())
        copies = self._host.hold(keep)
        if any(tensor.device.type != "cpu" for tensor in keep.values()):
            torch.cuda.synchronize()  # the memory goes next
        self._kept = [(tensor, copies[name]) for name, tensor in keep.items()]
        self._marked = [] if level == 1 else [(name, p.data) for name, p in named if p.dtype in _CAN_BE_MARKED]
        return sum(copy.nbytes for _, copy in self._kept)

    @torch.no_grad()
    def came_back(self) -> None:
        """Brings the kept ones back and marks the others. May be called again after the memory went once more."""
        for tensor, copy in self._kept:
            tensor.copy_(copy, non_blocking=True)
        for _, tensor in self._marked:
            _bits(_marks(tensor)).fill_(_MARK[tensor.dtype])  # `lacks` sees whether a sync overwrote it

    def settled(self) -> None:
        """The model is whole: its copies are worth nothing any more."""
        self._kept, self._marked = [], []

    @torch.no_grad()
    def lacks(self) -> str | None:
        """Why no token of this model would be worth anything: parameters that a sync has yet to write, wholly or in part, since
        they came back, or that it wrote as NaN. None: it is whole."""
        nan = {name: marks for name, tensor in self._marked if bool((marks := _marks(tensor)).isnan().any())}
        if left := [name for name, marks in nan.items() if bool((_bits(marks) == _MARK[marks.dtype]).any())]:
            return f"after a sleep without a copy no sync has brought back {_few(left)}"
        return f"training has diverged: the trainer's own weights hold NaN, in {_few(list(nan))}" if nan else None

    def _plain(self) -> Iterator[torch.Tensor]:
        """Attributes of modules with memory of their own."""
        known = {t.untyped_storage().data_ptr() for t in (*self._model.parameters(), *self._model.buffers())}
        for module in self._model.modules():
            # vLLM's slots of LoRA adapters are tuples and lists of tensors.
            held = [it if "lora" in name and isinstance(it, (tuple, list)) else [it] for name, it in vars(module).items()]
            for value in itertools.chain.from_iterable(held):
                if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
                    start = value.untyped_storage().data_ptr()
                    if start not in known:
                        known.add(start)
                        yield value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _marks(tensor: torch.Tensor) -> torch.Tensor:
    every = next((step for numbers, step in _EVERY if tensor.numel() <= numbers), _EVERY_OF_THE_LARGEST)
    return tensor.view(-1)[::every] if tensor.is_contiguous() else tensor
