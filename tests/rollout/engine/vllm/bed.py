"""Our server around a real vLLM engine of a tiny Qwen2, as an actor of a job has it, but in this process and without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from bench.memory_cycles import in_region
from tests.e2e import tiny
from verl_mux.config import completion, job_checks
from verl_mux.rollout.engine import engine_server, region_weights
from verl_mux.rollout.engine.region_weights import Place
from verl_mux.rollout.engine.server_directory import open_gate, wait_until_engine_is_at_gate
from verl_mux.rollout.engine.vllm import vllm_server
from verl_mux.sync.engine import Batch

PROMPT = [5, 9, 2, 11, 7, 3, 1, 8]
SLOTS = 4
_WITHIN_S = 300


class Looks(vLLMColocateWorkerExtension):
    """verl's extension, which also says what a worker holds."""

    def digests(self) -> dict[str, str]:
        """Of all parameters and buffers of this rank, without the rows that vLLM adds to the vocabulary."""
        model, rows = self.model_runner.model, self.model_config.get_vocab_size()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: digest(it[:rows] if "embed_tokens" in name else it) for name, it in named.items()}

    def resident(self) -> int:
        return psutil.Process().memory_info().rss


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


class Bed:
    """`server` is up and awake; its loop runs in a thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, keys: Collection[str] = ()) -> None:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        monkeypatch.setattr(engine_server, "check", lambda *_: None)
        monkeypatch.setattr(engine_server, "here", lambda: None)
        monkeypatch.setattr(vllm_server.MuxVllmHttpServer, "_get_worker_extension_cls", lambda _: f"{__name__}.Looks")
        if not (folder / "model").exists():
            tiny.make_assets(folder, hidden=256)
        self.model, config = folder / "model", _config(folder, keys)
        rollout = config.actor_rollout_ref.rollout
        gpus = rollout.tensor_model_parallel_size * rollout.data_parallel_size
        self.ranks = gpus
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.do(self._made(rollout, config.actor_rollout_ref.model, gpus))
        self.launch = asyncio.run_coroutine_threadsafe(self.server.launch_server(), self._loop)
        self.tokens_taken = 1

    async def _made(self, rollout: Any, model: Any, gpus: int) -> Any:
        return vllm_server.MuxVllmHttpServer(
            rollout, model, RolloutMode.STANDALONE, [None] * gpus, replica_rank=0, node_rank=0, gpus_per_node=gpus, nnodes=1,
            cuda_visible_devices=",".join(map(str, range(gpus))),
        )  # fmt: skip

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_WITHIN_S)

    def started(self) -> Bed:
        wait_until_engine_is_at_gate(self.server._directory)
        open_gate(self.server._directory)
        self.launch.result(_WITHIN_S)
        self.server._passage.fence.enter(self.tokens_taken)
        return self

    # ---------------------------------------------------------------- as a job does it

    def sleep(self, tags: list[str] | None = None, level: int = 2) -> dict[str, tuple[int, int]]:
        return _bytes(self.do(self.server.sleep(tags, level)))

    def wake(self, tags: list[str] | None = None) -> dict[str, tuple[int, int]]:
        self.tokens_taken += 1
        return _bytes(self.do(self.server.wake_up(tags, self.tokens_taken)))

    def sync(self, model: Path | None = None, without: Collection[str] = (), version: int = 1) -> None:
        """From a region that holds all of the model but these tensors, in batches as a rollout worker hands them on."""
        with in_region(model or self.model, without) as batch:
            place = Place(os.getpid(), batch.region.fd, batch.region.nbytes)
            for first, last in batch.layout.batches(1 << 19):
                part = Batch(batch.layout, batch.region, first, last)
                self.do(self.server.mux_load(region_weights.body(part, [place] * self.ranks)))
            self.do(self.server.mux_loaded(version))

    def cycle(self, level: int = 2) -> None:
        self.sleep(level=level)
        self.wake(["weights"])
        if level == 2:
            self.sync()
        self.wake(["kv_cache"])

    def generate(self, prompt: list[int] = PROMPT, count: int = 24, name: str | None = None, priority: int = 0, **params: Any):
        params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": True, **params}
        return self.server.generate(prompt, params, name or uuid4().hex, engine_priority=priority)

    def tokens(self, *args: Any, **kwargs: Any) -> list[int]:
        return list(self.do(self.generate(*args, **kwargs)).token_ids)

    def ask(self, method: str) -> list[Any]:
        return self.do(self.server._ask(method))

    def close(self) -> None:
        if hasattr(self.server, "engine"):
            self.server._ending.cancel()
            self._loop.call_soon_threadsafe(self.server.engine.shutdown)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WITHIN_S)


@contextlib.contextmanager
def bed(folder: Path, *keys: str) -> Iterator[Bed]:
    with pytest.MonkeyPatch.context() as patch:
        it = Bed(folder, patch, keys)
        try:
            yield it
        finally:
            it.close()
            shutil.rmtree(it.server._directory, ignore_errors=True)


def _bytes(answer: tuple[str, dict]) -> dict[str, tuple[int, int]]:
    node, moves = answer
    assert node == "r0"
    return {tag: (moved.nbytes, moved.mapped) for tag, moved in moves.items()}


def _config(folder: Path, keys: Collection[str]) -> Any:
    """Of a job of ours, complete as its driver makes it."""
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    own = [
        f"mux.profile.dir={folder / 'events'}", f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}", "mux.job=bed",
        "actor_rollout_ref.rollout.prompt_length=64", "actor_rollout_ref.rollout.response_length=128",
        "actor_rollout_ref.rollout.max_model_len=256", "mux.device.budget=null", "mux.rollout.dispatch.order=sjf",
        "mux.nodes.rollout=[r0]", "mux.nodes.train=[t0]", "mux.coordinator=null", "mux.device.wake_wait_s=0.0",
    ]  # fmt: skip
    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        config = compose("mux_ppo_trainer", [*tiny.overrides(folder, 1), *own, *keys])
    mux = job_checks.check(config)
    assert mux is not None
    completion.complete(config, mux, cpu=True)
    completion.hand_to_workers(config, mux, cpu=True)
    return config
