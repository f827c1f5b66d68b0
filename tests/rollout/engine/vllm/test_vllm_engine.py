"""A real engine of vLLM on the CPU, under our server: what a job does with it, and what it must not do to other jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.engine.vllm import bed as beds
from verl_mux.memory.tags import SleepState
from verl_mux.rollout.engine.server_directory import mapped_bytes
from verl_mux.rollout.engine.serving import ABORTED, LENGTH, STOPPED, Refused

pytestmark = pytest.mark.e2e

CACHE = 64 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def launched(folder):
    """An engine that arrived at its gate; then up."""
    with beds.bed(folder) as it:
        beds.wait_until_engine_is_at_gate(it.server._directory)
        before = mapped_bytes(it.server._directory), it.launch.done()
        it.started()
        it.cycle()  # vLLM starts with weights of its own making, as verl asks it to
        yield it, before


@pytest.fixture
def engine(launched):
    """Awake, with the weights of its model's file."""
    it = launched[0]
    if it.server._states.state is not SleepState.ACTIVE:
        it.wake(["weights"])
        it.sync()
        it.wake()
    return it


def test_a_launch_maps_nothing_before_its_gate_opens(launched):
    _, before = launched
    assert before == ({}, False)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_answers_as_before_and_holds_nothing_meanwhile(engine, level):
    expected, held = engine.tokens(), engine.ask("digests")
    slept = engine.sleep(level=level)
    assert {tag: left for tag, (_, left) in slept.items()} == {"weights": 0, "kv_cache": 0} and slept["kv_cache"][0] == CACHE
    assert mapped_bytes(engine.server._directory) == {"weights": 0, "kv_cache": 0}
    with pytest.raises(RuntimeError):
        engine.tokens()
    assert engine.wake(["weights"])["weights"] == slept["weights"][:1] * 2
    if level == 2:
        engine.sync()
    engine.wake(["kv_cache"])
    # Buffers too, which no sync sends.
    assert engine.ask("digests") == held and engine.tokens() == expected


def test_the_kv_cache_sleeps_alone(engine):
    expected = engine.tokens()
    assert engine.sleep(["kv_cache"]) == {"kv_cache": (CACHE, 0)}
    assert mapped_bytes(engine.server._directory)["weights"] > 0
    assert engine.wake(["kv_cache"]) == {"kv_cache": (CACHE, CACHE)} and engine.tokens() == expected


def test_weights_are_those_of_the_sync_to_the_bit(engine, folder):
    expected, other = engine.tokens(), _other(engine.model, folder / "other")
    engine.sleep()
    engine.wake(["weights"])
    engine.sync(other, version=7)
    engine.wake()
    assert engine.server.global_steps == 7
    assert not _differing(other, engine.ask("digests")[0]) and engine.tokens() != expected
    engine.sync()
    assert not _differing(engine.model, engine.ask("digests")[0]) and engine.tokens() == expected


# What vLLM has as one parameter.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _differing(model: Path, digests: dict[str, str]) -> list[str]:
    """Parameters whose bytes are not those of the file."""
    of_file = load_file(model / "model.safetensors")
    for name in [name for name in digests if name not in of_file]:
        for merged, parts in MERGED.items():
            if merged in name:
                of_file[name] = torch.cat([of_file.pop(name.replace(merged, part)) for part in parts])
    assert len(of_file) > 10 and set(of_file) <= set(digests)
    return [name for name, tensor in of_file.items() if beds.digest(tensor) != digests[name]]


def _other(model: Path, to: Path) -> Path:
    to.mkdir(exist_ok=True)
    save_file({name: it * -1.5 for name, it in load_file(model / "model.safetensors").items()}, to / "model.safetensors")
    return to


def test_the_cache_does_not_wake_over_weights_that_no_sync_brought_back(engine):
    expected, lacking = engine.tokens(), "model.layers.1.mlp.down_proj.weight"
    engine.sleep()
    engine.wake(["weights"])
    engine.sync(without=(lacking,))
    with pytest.raises(Refused, match=f"no sync has brought back {lacking}"):
        engine.wake(["kv_cache"])
    assert mapped_bytes(engine.server._directory)["kv_cache"] == 0
    engine.sync()
    engine.wake(["kv_cache"])
    assert engine.tokens() == expected


def test_an_end_is_not_a_spent_budget(engine):
    whole = engine.do(engine.generate(count=24))
    assert (whole.stop_reason, len(whole.token_ids)) == (LENGTH, 24)
    stop = list(whole.token_ids)[10]
    ended = engine.do(engine.generate(count=24, stop_token_ids=[stop]))
    assert ended.stop_reason == STOPPED and list(ended.token_ids)[-1] == stop


def test_aborted_requests_leave_with_their_tokens_and_no_other_does(engine):
    async def play():
        running = {name: asyncio.create_task(engine.generate(count=180, name=name)) for name in ("r/1", "r/10", *"abcdef")}
        while engine.server._stalls._since is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await engine.server.abort_requests(["r/1", *"abcdef"])
        aborted = await asyncio.gather(*[task for name, task in running.items() if name != "r/10"])
        return aborted, await running["r/10"]

    aborted, other = engine.do(play())
    assert {output.stop_reason for output in aborted} == {ABORTED}
    assert sorted(len(output.token_ids) for output in aborted)[-1] > 0
    assert (other.stop_reason, len(other.token_ids)) == (LENGTH, 180)


def test_urgent_requests_go_first(engine):
    async def play():
        order = []

        async def one(name, priority):
            await engine.generate(count=40, name=name, priority=priority)
            order.append(priority)

        tasks = [asyncio.create_task(one(f"idle{at}", 0)) for at in range(3 * beds.SLOTS)]
        await asyncio.sleep(0.3)
        tasks += [asyncio.create_task(one(f"urgent{at}", 5)) for at in range(2)]
        await asyncio.gather(*tasks)
        return order

    order = engine.do(play())
    # Those that ran already went on.
    assert max(at for at, priority in enumerate(order) if priority == 5) <= beds.SLOTS + 4


@pytest.mark.parametrize("cut", [1, 13])
def test_a_seeded_response_that_is_cut_and_goes_on_is_the_uncut_one(engine, cut):
    seeded = {"temperature": 1.0, "seed": 41}
    whole = engine.tokens(count=30, **seeded)
    assert whole != engine.tokens(count=30, temperature=1.0, seed=42)
    first = engine.tokens(count=cut, **seeded)
    assert first + engine.tokens(beds.PROMPT + first, count=30 - cut, **seeded) == whole


def test_a_seeded_prompt_may_be_read_in_parts(engine):
    assert len(engine.tokens(beds.PROMPT * 20, count=4, temperature=1.0, seed=1)) == 4


def test_fifty_cycles_grow_nothing(engine):
    expected = engine.tokens()
    for _ in range(5):
        engine.cycle()
    (before,) = engine.ask("resident")
    for at in range(50):
        engine.cycle(level=1 + at % 2)
    (after,) = engine.ask("resident")
    assert after - before < 20 << 20
    assert engine.tokens() == expected


def test_no_name_of_an_engine_outlives_an_actor_that_is_killed(engine):
    maps = [Path(f"/proc/{it.pid}/maps").read_text() for it in psutil.Process().children(recursive=True)]
    shared = {line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if "/dev/shm/psm_" in line}
    assert shared and all(name.endswith("(deleted)") for name in shared)
    # The job's folder goes with the job. verl's own socket for weights, one for all jobs on a host, is not there.
    assert any(path.is_socket() for path in engine.server._directory.iterdir())
    assert not list(Path("/tmp").glob("rl-colocate-zmq-*"))
