"""What must hold on any device, GPU or not: each scene plays and returns what was wrong, a line each; nothing: all is well."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from tests.gpu import holder, record
from tests.gpu.engines import ROOT, Bed, Engine, EngineEnded
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.memory.tags import KV_CACHE, WEIGHTS

PHASES = ("init", "rollout", "train")
NODES = {"rollout": ["r0"], "train": ["t0"]}
MIB = 2**20
# The driver rounds, and a first round makes what later ones keep.
ROUNDING, WARM_UP = 64 * MIB, 3


def kept_asleep(bed: Bed, engine: Engine, limit: int) -> list[str]:
    """(1) A sleeping engine's processes keep no more than what is charged for them, and it held its tags before."""
    awake = bed.held(engine)
    if sum(awake.values()) < sum(engine.tags.values()):
        return [f"{engine.name} holds {sum(awake.values())} bytes awake, less than its tags: its processes are not seen"]
    engine.sleep()
    asleep = bed.held(engine)
    engine.back()
    return [f"pid {pid} of {engine.name} keeps {held} bytes asleep, of {limit}" for pid, held in asleep.items() if held > limit]


def growth(bed: Bed, engine: Engine, rounds: int, share: float = 0.01) -> list[str]:
    """(2) Wake, sync, sleep and again: no process grows, asleep or awake, and the tokens stay."""
    expected, after = engine.tokens(), []
    for _ in range(rounds):
        engine.sleep()
        asleep = bed.held(engine)
        engine.back()
        after.append((asleep, bed.held(engine)))
        if engine.tokens() != expected:
            return [f"{engine.name} gives other tokens after {len(after)} rounds"]
    early, late = after[WARM_UP], after[-1]
    if not all(late):
        return [f"no process of {engine.name} is seen to hold anything"]
    return [
        f"pid {pid} of {engine.name} grew from {before.get(pid, 0)} to {held} bytes"
        for before, now in zip(early, late, strict=True)
        for pid, held in now.items()
        if held > before.get(pid, 0) * (1 + share) + ROUNDING
    ]


def filled_by_the_sync(engine: Engine, fresh: Sequence[int]) -> list[str]:
    """(3) After a sleep that keeps nothing the weights are marked (NaN); the cache does not come back before a sync has
    overwritten all of them, and the tokens are then those of a fresh engine."""
    wrong = []
    engine.sleep(level=2)
    engine.wake(WEIGHTS)
    try:
        engine.wake(KV_CACHE)
        wrong.append(f"{engine.name} woke without its weights")
        engine.sleep(tags=(KV_CACHE,))
    except EngineEnded:
        raise
    except RuntimeError as error:
        wrong += [] if "no sync has brought back" in str(error) else [f"{engine.name}: {error}"]
    engine.ask("sync")
    try:
        engine.wake(KV_CACHE)
    except EngineEnded:
        raise
    except RuntimeError as error:
        return [*wrong, f"{engine.name} after the sync: {error}"]
    tokens = engine.tokens(len(fresh))
    return (
        wrong if tokens == list(fresh) else [*wrong, f"{engine.name} gives {tokens} after the sync, a fresh engine {list(fresh)}"]
    )


def sized_beside(bed: Bed, alone: Engine, share: float, fault: str = "") -> list[str]:
    """(11) An engine that starts while another process takes more and more of the device has no larger weights than one that
    starts alone, and sleeps and comes back. `alone`: such an engine, which ends first."""
    weights, expected = alone.tags[WEIGHTS], alone.tokens()
    alone.end()
    engine = bed.engine("beside", share, gate=True, fault=fault)
    engine.wait_at_gate()
    kind = "bed" if bed.kind == "bed" else "cuda"
    command = [sys.executable, "-m", "tests.gpu.holder", "grows", kind]
    environment = {**os.environ, **bed.environment, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "held\n"
        other.stdin.write("grow\n")
        other.stdin.flush()
        before = bed.used()
        engine.open()
        record.note(taken_meanwhile_bytes=bed.used() - before - sum(engine.tags.values()))
        found = engine.tags[WEIGHTS]
        more = found > 1.01 * weights
        wrong = [f"an engine that starts beside another has {found} bytes of weights, not {weights}"] if more else []
        try:
            engine.sleep()
            engine.back()
            wrong += [] if engine.tokens() == expected else [f"{engine.name} gives other tokens than one alone"]
        except RuntimeError as error:
            wrong.append(f"{engine.name}: {error}")
        other.stdin.close()
    return wrong


def as_if_alone(bed: Bed, alone: int, residue: int, share: float, ranks: int = 1, fault: str = "") -> list[str]:
    """(5, 6) An engine that starts while another generates has the KV cache that it would have alone (`alone` bytes), but for its
    share of what the other keeps asleep (`residue` bytes)."""
    first = bed.engine("awake", share)
    first.say("tokens", count=64)
    second = bed.engine("joins", share, ranks=ranks, gate=True, fault=fault)
    second.wait_at_gate()
    first.answer()
    first.sleep()
    second.open()
    found, least = second.tags[KV_CACHE], 0.98 * (alone - share * ranks * residue)
    return [] if found >= least else [f"an engine that joins has a KV cache of {found} bytes, at least {least:.0f} were expected"]


def no_room(awake: Engine, sleeper: Engine) -> list[str]:
    """(7) A wake for which there is no room is an error that names the holders; no job is hurt; with room the wake works."""
    wrong, before = [], awake.tokens()
    try:
        sleeper.wake(WEIGHTS, KV_CACHE)
        return [f"{sleeper.name} woke where there was no room"]
    except EngineEnded as ended:
        return [f"a wake without room ended {sleeper.name}: {ended}"]
    except RuntimeError as error:
        holder = f"{awake.name} (pid {awake.pid})" if awake.is_on_the_ledger else ""  # a driver does not know of jobs
        wrong += [] if all(word in str(error) for word in ("no room", "held by", holder)) else [f"{sleeper.name}: {error}"]
    wrong += [] if awake.tokens() == before else [f"{awake.name} gives other tokens than before"]
    awake.sleep()
    sleeper.back()
    return wrong


def killed_in(bed: Bed, phase: str, *more: str) -> list[str]:
    """(8) A job's driver is killed in a phase while a child of it holds device memory, and another waits for its node. Returns
    what was wrong when that job got the node. `more`: see holder.py."""
    pools = {side: {"nodes": [{"name": name} for name in names]} for side, names in NODES.items()}
    with Coordinator(make_config({"pools": pools, "kill_grace": 0.5})) as coordinator:
        assert coordinator.address is not None
        uid = f"dies:{uuid.uuid4().hex}"
        kind = "bed" if bed.kind == "bed" else "cuda"
        command = [sys.executable, "-m", "tests.gpu.holder", coordinator.address, "dies", phase, kind, *more]
        environment = {**os.environ, **bed.environment, UID_VARIABLE: uid, "PYTHONPATH": str(ROOT)}
        before = bed.used()
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        shown = bool(bed.by_pid().get(child))

        def held() -> int:
            return bed.by_pid().get(child, 0) if shown else bed.used() - before

        try:
            if (taken := held()) < holder.SIZE:
                return [f"pid {child} holds {holder.SIZE} bytes of device memory, and the device shows {taken}"]
            lives = connect(coordinator.address, "lives", NODES, uid=f"lives:{uuid.uuid4().hex}", timeout=60.0)
            with record.timed("granted"):
                driver.kill()
                driver.wait()
                lease = lives.acquire(phase, step=0 if phase == "init" else 1)
            left = held()
            record.note(taken_bytes=taken, left_bytes=left)
            lives.release(lease)
            lives.close()
            wrong = left > (0 if shown else ROUNDING)
            return [f"pid {child} of the dead job holds {left} bytes when its node is granted"] if wrong else []
        finally:
            driver.kill()
            driver.wait()
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(child).kill()


def copied_when_told(
    states: Any, copies: Callable[[], list[Any]], device_bytes: Callable[[], int], workspaces: int = 0
) -> list[str]:
    """(10) As soon as a sleep has returned, the host copy (`copies`) is whole bit by bit, and the device is free of it, but for
    so many bytes of the libraries' workspaces."""
    before, held = [copy.clone() for copy in copies()], device_bytes()
    with record.timed("sleep"):
        states.sleep()
    wrong = [
        f"tensor {at} differs on the host"
        for at, (one, other) in enumerate(zip(before, copies(), strict=True))
        if not same(one, other)
    ]
    left = device_bytes()
    record.note(held_bytes=held, left_bytes=left)
    stays = not held or left > max(0.01 * held, min(workspaces, 0.5 * held))
    return wrong + ([f"{left} of {held} bytes stay on the device"] if stays else [])


def same(one: Any, other: Any) -> bool:
    """Bit by bit, NaN included."""
    import torch

    raw = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*raw))


def weights_agree(steps: Sequence[Mapping[str, float]], wanted: int, least: float = 0.9) -> list[str]:
    """(4, 9) The engine's probabilities of the tokens that it drew go with the trainer's, step by step: they do not where it has
    other weights. `steps`: verl's metrics."""
    name = "training/rollout_actor_probs_pearson_corr"
    found = [step[name] for step in steps if name in step]
    wrong = [f"step {at}: correlation {value:.3f} with the trainer's" for at, value in enumerate(found, 1) if not value >= least]
    return wrong + ([] if len(found) == wanted else [f"{len(found)} steps of {wanted}"])


def in_turns(grants: Sequence[tuple[str, float, float]]) -> list[str]:
    """(4) Leases of one node, (job, from, until): never two at once, and both jobs had some."""
    ordered = sorted(grants, key=lambda grant: grant[1])
    overlapping = [(a, b) for a, b in itertools.pairwise(ordered) if b[1] < a[2]]
    wrong = [f"{a[0]} and {b[0]} held the node at {b[1]}" for a, b in overlapping]
    jobs = {job for job, *_ in grants}
    return wrong if len(jobs) > 1 else [*wrong, f"only {sorted(jobs)} held the node"]
