"""`python -m bench.memory_cycles ...`: one real engine on the CPU sleeps and wakes; JSON on stdout.

Behind `verl-mux bench memory`: in a process of its own, since an engine takes its environment from it. Requests go the way
that the server's do (manager.py). Touches a folder in shared memory, and the engine that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from verl_mux.memory.tags import KV_CACHE, WEIGHTS
from verl_mux.rollout.engine.server_directory import DIRECTORY_VARIABLE, mapped_bytes, open_gate
from verl_mux.rollout.engine.sglang.plugin import ENGINE_MARK
from verl_mux_cpu import cpu_engine

if TYPE_CHECKING:
    from verl_mux.sync.engine import Batch

_PROMPT = [5, 9, 2, 11, 7, 3, 1, 8]
_NEW_TOKENS = 8
_LAYERS, _HEAD = 8, 64
_VOCABULARY = 1024
BOTH = [KV_CACHE, WEIGHTS]
# (level, what is asked in this order). A level 2 sleep is followed by a sync once the weights are there.
KINDS: dict[str, tuple[int, list[tuple[str, list[str]]]]] = {
    "level 2": (2, [("sleep", BOTH), ("wake", [WEIGHTS]), ("sync", []), ("wake", [KV_CACHE])]),
    "level 1": (1, [("sleep", BOTH), ("wake", [WEIGHTS, KV_CACHE])]),
    "cache alone": (2, [("sleep", [KV_CACHE]), ("wake", [KV_CACHE])]),
    "in parts": (1, [("sleep", [KV_CACHE]), ("sleep", [WEIGHTS]), ("wake", [WEIGHTS]), ("wake", [KV_CACHE])]),
    "again": (2, [("sleep", BOTH), ("sleep", BOTH), ("wake", [WEIGHTS]), ("wake", [WEIGHTS]), ("sync", []), ("wake", BOTH)]),
}
# One tensor that the engine has under another name together with others, one of a pair, one by itself.
_LACKING = ("model.layers.3.self_attn.k_proj.weight", "model.layers.5.mlp.up_proj.weight", "model.norm.weight")
# What verl does by itself: a copy of the weights is kept, comes back, and is then overwritten.
STOCK = {"stock": KINDS["level 2"]}


class Cycles:
    """One engine of `ranks` tensor parallel ranks. `backup`: the saver itself keeps a copy of the weights, as verl's own modes
    make it."""

    def __init__(self, folder: Path, parameters: int, backup: bool, ranks: int) -> None:
        self._ranks = ranks
        self._model = folder / "model"
        make_model(self._model, parameters, ranks)
        self._reports = folder / "reports"
        self._reports.mkdir()
        open_gate(self._reports)
        os.environ |= {ENGINE_MARK: "1", DIRECTORY_VARIABLE: str(self._reports), "VERL_PLATFORM": "cpu"}
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", **cpu_engine.environment(ranks)}
        import sglang

        from verl_mux.rollout.engine.sglang.sglang_weights import LOADER

        self._engine = sglang.Engine(
            model_path=str(self._model), dtype="float32", device="cpu", attention_backend="torch_native",
            sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True, skip_tokenizer_init=True,
            max_total_tokens=512, max_running_requests=4, context_length=256, enable_memory_saver=True,
            enable_weights_cpu_backup=backup, sleep_on_idle=True, log_level="error", skip_server_warmup=True,
            tp_size=ranks, custom_weight_loader=[LOADER],
        )  # fmt: skip
        self.expected = self.generate()
        self.tags = mapped_bytes(self._reports)
        self.seconds: dict[str, list[float]] = {"sleep": [], "wake": [], "sync": []}
        self.stale_bytes = 0

    def generate(self) -> list[int]:
        """Greedy tokens; also touches the whole KV cache's first pages."""
        answer = self._engine.generate(
            input_ids=_PROMPT, sampling_params={"temperature": 0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
        )
        return answer["output_ids"]

    def resident(self) -> int:
        """Bytes of the processes that hold the model."""
        pids = [int(path.stem) for path in self._reports.glob("*.json")]
        return sum(psutil.Process(pid).memory_info().rss for pid in pids)

    def run(self, kind: tuple[int, list[tuple[str, list[str]]]]) -> float:
        """One cycle. Returns resident bytes that went at its deepest, over those of the tags that slept."""
        level, steps = kind
        before, asleep, deepest, slept = self.resident(), set[str](), 0, 0
        took = dict.fromkeys(self.seconds, 0.0)
        for verb, tags in steps:
            started = time.perf_counter()
            if verb == "sync":
                self._sync()
            else:
                copied = self._ask(verb, tags, level)
                self.stale_bytes += copied if level == 2 else 0
            took[verb] += time.perf_counter() - started
            asleep = asleep | set(tags) if verb == "sleep" else asleep - set(tags)
            if (size := sum(self.tags[tag] for tag in asleep)) >= slept and verb == "sleep":
                deepest, slept = before - self.resident(), size
        if level == 2 and WEIGHTS in steps[0][1]:
            for verb, seconds in took.items():
                self.seconds[verb].append(seconds)
        return deepest / slept

    def hostile(self, sequences: int) -> dict[str, Any]:
        """Random sequences of what ends a stock scheduler: released or resumed twice, in the wrong order, resumed though
        never released; then a sync that does not bring everything, which is refused (`lacking`: with these words). The engine
        then generates as before."""
        from verl_mux.rollout.engine.sglang.manager import Refused

        rng, refused = random.Random(0), 0
        for _ in range(sequences):
            for _ in range(rng.randrange(1, 5)):
                verb, tags = rng.choice(("sleep", "wake")), rng.sample([KV_CACHE, WEIGHTS, "cuda_graph", "no such tag"], 2)
                try:
                    self._ask(verb, tags, 1)
                except Refused:
                    refused += 1
        self._ask("wake", [*BOTH, "cuda_graph"], 1)
        lacking = self._lacking()
        return {
            "sequences": sequences,
            "refused": refused,
            "lacking": lacking,
            "tokens_equal": self.generate() == self.expected,
        }

    def _lacking(self) -> str:
        """What the engine answers when a sync lacked these; "" if it goes on as if nothing were."""
        from verl_mux.rollout.engine.sglang.manager import Refused

        self._ask("sleep", BOTH, 2)
        self._ask("wake", [WEIGHTS], 2)
        self._sync(without=_LACKING)
        try:
            self._ask("wake", [KV_CACHE], 2)
            answer = ""
        except Refused as error:
            answer = str(error)
        self._sync()
        self._ask("wake", [KV_CACHE], 2)
        return answer

    def close(self) -> None:
        self._engine.shutdown()

    def _ask(self, verb: str, tags: list[str], level: int) -> int:
        from verl_mux.rollout.engine.sglang.manager import move

        return self._engine.loop.run_until_complete(move(self._engine.tokenizer_manager, verb, tags, level, 0.0))

    def _sync(self, without: Collection[str] = ()) -> None:
        sync(self._engine, self._model, self._ranks, without)


def sync(engine: Any, model: Path, ranks: int, without: Collection[str] = ()) -> None:
    """As a rollout worker does it, from a region that has all of the model but these tensors. `ranks`: of the engine."""
    from verl_mux.rollout.engine.region_weights import Place
    from verl_mux.rollout.engine.sglang.sglang_weights import request

    with in_region(model, without) as batch:
        asked = request(batch, [Place(os.getpid(), batch.region.fd, batch.region.nbytes)] * ranks)
        done, message = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(asked, None))
        assert done, message
        assert engine.flush_cache().success


@contextlib.contextmanager
def in_region(model: Path, without: Collection[str]) -> Iterator[Batch]:
    from safetensors.torch import load_file

    from verl_mux.sync.engine import Batch
    from verl_mux.sync.export import as_bytes
    from verl_mux.sync.layout import Entry, Layout, Region

    tensors = {name: it for name, it in load_file(model / "model.safetensors").items() if name not in without}
    layout = Layout(
        [Entry(name, str(it.dtype).removeprefix("torch."), tuple(it.shape), it.nbytes) for name, it in tensors.items()]
    )
    region = Region.made(layout.nbytes)
    for it, offset in zip(tensors.values(), layout.offsets, strict=True):
        region.view[offset : offset + it.nbytes] = as_bytes(it)
    try:
        yield Batch(layout, region, 0, len(layout.entries))
    finally:
        region.close()


def make_model(folder: Path, parameters: int, ranks: int = 1) -> None:
    """An untrained Qwen2 of about `parameters` parameters. A layer has 2.25 h^2 of attention (an eighth of key-value heads) and
    12 h^2 in its MLP. `ranks`: that it can be split over."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden = max(round((parameters / _LAYERS / 14.5) ** 0.5 / (8 * _HEAD)), 1) * 8 * _HEAD
    heads = hidden // _HEAD
    config = Qwen2Config(
        vocab_size=_VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=_LAYERS,
        num_attention_heads=heads, num_key_value_heads=max(heads // 8, ranks), max_position_embeddings=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def measure(parameters: int, cycles: int, backup: bool, hostile: int, ranks: int = 1) -> dict[str, Any]:
    """`cycles` cycles of all kinds in turn, or of the stock kind alone."""
    kinds = STOCK if backup else KINDS
    folder = Path(tempfile.mkdtemp(prefix="verl_mux_cycles_", dir="/dev/shm"))
    try:
        run = Cycles(folder, parameters, backup, ranks)
        equal, gone, after = True, [], []
        for name in islice(cycle(kinds), cycles):
            fraction = run.run(kinds[name])
            equal = equal and run.generate() == run.expected
            after.append(run.resident())
            # Of a sleep at level 1 the copy is resident too, on a machine whose device is its host.
            if name in ("level 2", "again"):
                gone.append(fraction)
        figures = {
            "cycles": cycles, "tokens_equal": equal, "returned_fraction": min(gone, default=None),
            "growth": growth(after, len(kinds)), "stale_bytes": run.stale_bytes,
            "seconds": run.seconds, "tags": run.tags, "hostile": run.hostile(hostile),
        }  # fmt: skip
        run.close()
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def growth(after: list[int], kinds: int) -> float | None:
    """Resident bytes after the cycles of the last whole round of all kinds over those of the second round, less 1, each round by
    its median; negative where they fell. The first round is left out: the first cycle of each kind makes what later ones keep.
    None with fewer than three rounds."""
    rounds = [median(after[at : at + kinds]) for at in range(kinds, len(after) - kinds + 1, kinds)]
    return rounds[-1] / rounds[0] - 1 if len(rounds) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backup", action="store_true")
    parser.add_argument("--hostile", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(measure(given.parameters, given.cycles, given.backup, given.hostile, given.ranks)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
