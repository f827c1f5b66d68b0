"""What our server asks of vLLM, whose engine stands in here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput
from vllm.v1.engine import core_client

from verl_mux.rollout.engine.server_directory import DIRECTORY_VARIABLE
from verl_mux.rollout.engine.serving import ABORTED, LENGTH, STOPPED, EngineFailed, Refused
from verl_mux.rollout.engine.vllm import vllm_server
from verl_mux.rollout.engine.vllm.vllm_calls import REASON
from verl_mux.rollout.engine.vllm.vllm_server import MuxVllmHttpServer

RPC = "VLLM_RPC_BASE_PATH"
FINE = {"error": None, "failed": False}


class Client:
    """Of two engine cores with two workers each; `answers`: by core, of its workers to a verb; other calls are noted."""

    core_engines = (b"0", b"1")

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.answers: dict[tuple[bytes, str], list[dict] | Exception] = {}

    async def _call_utility_async(self, rpc, method, timeout, args, kwargs, engine):
        assert (rpc, timeout, kwargs) == ("collective_rpc", None, None)
        self.asked.append((engine, method, *args))
        answer = self.answers.get((engine, args[0] if args else method), [FINE, FINE])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def server():
    it = MuxVllmHttpServer.__new__(MuxVllmHttpServer)
    it.steps = []

    async def note(name, **keys):
        it.steps.append((name, keys))

    it.engine = SimpleNamespace(
        engine_core=Client(),
        pause_generation=lambda **keys: note("pause", **keys),
        resume_generation=lambda: note("resume"),
        abort=lambda names: note("abort", names=names),
    )
    it._settings = SimpleNamespace(device=SimpleNamespace(wake_wait_s=3.0))
    it._directory = Path("/tmp/server_0_0")
    it.replica_rank, it.replica_world_size, it.node_rank, it.gpus_per_node = 1, 2, 0, 2
    it.config = SimpleNamespace(n_gpus_per_node=4)
    return it


def carry_out(server, verb, tag, level=2):
    asyncio.run(server._carry_out(verb, tag, level))
    return server.engine.engine_core.asked


def test_every_worker_of_every_engine_core_is_asked(server):
    assert carry_out(server, "wake", "weights") == [
        (core, "mux_move", "wake", "weights", 2, 3.0) for core in Client.core_engines
    ]  # fmt: skip
    assert server.steps == []


def test_nothing_is_scheduled_between_the_sleep_of_the_cache_and_its_wake(server):
    carry_out(server, "sleep", "kv_cache")
    assert server.steps == [("pause", {"mode": "abort", "clear_cache": True})]
    carry_out(server, "sleep", "weights")
    carry_out(server, "wake", "weights")
    assert len(server.steps) == 1
    carry_out(server, "wake", "kv_cache")
    assert server.steps[1:] == [("resume", {})]


def test_a_wake_that_one_worker_refuses_is_taken_back_at_all_of_them(server):
    server.engine.engine_core.answers[b"1", "wake"] = [FINE, {"error": "no room to wake: held by math (pid 7)", "failed": False}]
    with pytest.raises(Refused, match="held by math"):
        carry_out(server, "wake", "kv_cache", level=1)
    asked = server.engine.engine_core.asked
    assert asked[2:] == [(core, "mux_move", "sleep", "kv_cache", 1, 0.0) for core in Client.core_engines] and not server.steps


@pytest.mark.parametrize("answer", [[FINE, {"error": "wake of weights failed: gone", "failed": True}], RuntimeError("gone")])
def test_an_engine_of_which_a_worker_failed_is_not_asked_again(server, answer):
    server.engine.engine_core.answers[b"0", "wake"] = answer
    with pytest.raises(EngineFailed, match="gone"):
        carry_out(server, "wake", "weights")
    assert len(server.engine.engine_core.asked) == 2


@pytest.mark.parametrize(
    ("of_verl", "of_vllm", "reason"),
    [
        ("completed", "stop", STOPPED),
        ("completed", "length", LENGTH),
        ("aborted", "abort", ABORTED),
        ("aborted", None, ABORTED),  # of a request that never reached the engine
        ("repetition", "repetition", "repetition"),
    ],
)
def test_a_stay_ends_for_one_of_our_reasons(server, of_verl, of_vllm, reason):
    output = TokenOutput(token_ids=[1], log_probs=None, stop_reason=of_verl)
    assert server._stop_reason(output, {}, {REASON: of_vllm} if of_vllm else {}) == reason


def test_aborts_go_by_the_names_that_we_gave(server):
    asyncio.run(server._abort(["a", "b"]))
    assert server.steps == [("abort", {"names": ["a", "b"]})]


def test_a_launch_may_wait_for_its_init_lease_as_long_as_zmq_can(server, monkeypatch):
    import zmq

    for name in (
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_LOG_STATS_INTERVAL",
        vllm_server.FIRST_DEVICE_VARIABLE,
        DIRECTORY_VARIABLE,
        RPC,
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(core_client, "VLLM_ENGINE_READY_TIMEOUT_S", 600)
    server._prepare()
    patience_ms = core_client.VLLM_ENGINE_READY_TIMEOUT_S * 1000
    assert patience_ms > 7 * 24 * 3600 * 1000
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with context.socket(zmq.REQ) as other:
            other.connect(f"tcp://127.0.0.1:{port}")
            other.send(b"ready")
            assert socket.poll(patience_ms)


@pytest.mark.parametrize(("folder", "there"), [("/tmp/verl_mux_0123456789ab/server_0_0", True), ("/scratch/" + "a" * 80, False)])
def test_sockets_lie_in_the_jobs_folder_where_their_paths_fit(server, monkeypatch, folder, there):
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_LOG_STATS_INTERVAL", vllm_server.FIRST_DEVICE_VARIABLE, RPC):
        monkeypatch.setenv(name, "")
    server._directory = Path(folder)
    server._prepare()
    assert os.environ[RPC] == (folder if there else "")


def test_a_server_takes_the_devices_of_its_place_on_its_node(server):
    assert server._first_device() == 2


def test_an_actor_ends_with_its_engine(server, monkeypatch):
    ended = []
    monkeypatch.setattr(vllm_server, "_LOOK_S", 0.0)
    monkeypatch.setattr(vllm_server.os, "_exit", ended.append)
    states = iter([False, False, True])
    server.engine = type("Dead", (), {"errored": property(lambda _: next(states)), "shutdown": lambda _: ended.append("shut")})()
    asyncio.run(server._end_with_engine())
    assert ended == ["shut", 1]
