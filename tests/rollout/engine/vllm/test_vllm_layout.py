"""Two engine cores of two tensor parallel ranks each, real ones on the CPU, under one server of ours."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from tests.rollout.engine.vllm import bed as beds
from verl_mux.rollout.engine.server_directory import mapped_bytes
from verl_mux.rollout.engine.serving import Refused
from verl_mux.rollout.engine.vllm import vllm_server

pytestmark = pytest.mark.e2e

ROLLOUT = "actor_rollout_ref.rollout"
RANKS, CACHE = 4, 16 << 20


def test_all_ranks_sleep_and_wake_together_and_have_the_weights_of_a_sync(tmp_path, monkeypatch):
    keys = [
        f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.n_gpus_per_node={RANKS}",
        f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={CACHE}",
    ]  # fmt: skip
    with beds.bed(tmp_path, *keys) as engine:
        engine.started().cycle()
        processes = psutil.Process().children(recursive=True)

        async def several():
            # Both cores have some of them.
            return await asyncio.gather(*[engine.generate() for _ in range(6)])

        expected = {tuple(output.token_ids) for output in engine.do(several())}
        assert len(expected) == 1
        held = engine.ask("digests")
        assert len(held) == RANKS and held[0] != held[1] and held[:2] == held[2:]

        for level in (2, 1):
            slept = engine.sleep(level=level)
            assert slept["kv_cache"] == (RANKS * CACHE, 0)
            assert mapped_bytes(engine.server._directory) == {"weights": 0, "kv_cache": 0}
            engine.wake(["weights"])
            if level == 2:
                with pytest.raises(Refused, match="no sync has brought back"):
                    engine.wake(["kv_cache"])
                assert mapped_bytes(engine.server._directory)["kv_cache"] == 0
                engine.sync()
            engine.wake(["kv_cache"])
            assert engine.ask("digests") == held
        assert {tuple(output.token_ids) for output in engine.do(several())} == expected

        # A core that is gone takes the actor along, and with it what is left of the engine.
        ended = []
        monkeypatch.setattr(vllm_server.os, "_exit", ended.append)
        cores = [it for it in processes if it.is_running() and it.cmdline() and "EngineCore" in it.cmdline()[0]]
        assert len(cores) == 2
        cores[1].send_signal(signal.SIGKILL)
        engine.do(_waited(engine.server._ending))
        assert ended == [1]
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not [it for it in alive if "VLLM" in " ".join(it.cmdline())]


async def _waited(task: asyncio.Task) -> None:
    await asyncio.wait({task}, timeout=60)
