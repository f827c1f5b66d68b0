"""An agent loop made directly is the one that Hydra makes; and what the manager sends to which worker."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import hydra
import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from verl_mux.rollout.instructions import Launch
from verl_mux.rollout.worker import agent_loop
from verl_mux.rollout.worker.agent_loop import MuxAgentLoopManager, MuxAgentLoopWorker, make_agent_loop


class Loop:
    def __init__(self, tokenizer, depth=1):
        self.tokenizer, self.depth = tokenizer, depth


HERE = f"{__name__}.Loop"


@pytest.mark.parametrize("entry", [{"_target_": HERE}, {"_target_": HERE, "depth": 3}, OmegaConf.create({"_target_": HERE})])
def test_as_hydra_makes_it(entry):
    tokenizer = object()
    ours = make_agent_loop(entry, tokenizer=tokenizer)
    theirs = hydra.utils.instantiate(config=entry, tokenizer=tokenizer)
    assert type(ours) is type(theirs) is Loop
    assert (ours.tokenizer, ours.depth) == (theirs.tokenizer, theirs.depth) and ours.tokenizer is tokenizer


def test_verls_own_way_passes_the_arguments_that_ours_does():
    """What is written anew here must follow verl's."""
    ours, theirs = map(inspect.getsource, (MuxAgentLoopWorker._run_loop, AgentLoopWorker._run_agent_loop))
    passed = [line.strip() for line in theirs.splitlines() if "=" in line and line.strip().endswith(",") and "self" in line]
    assert len(passed) >= 8 and all(line in ours for line in passed)


class Sent:
    """A worker that keeps what it is sent."""

    def __init__(self) -> None:
        self.known = {}
        self.launch = SimpleNamespace(remote=lambda launches, batch, known: self.known.update(known))


def test_of_a_checkpoint_each_worker_gets_what_its_own_groups_had(monkeypatch):
    """All of it is gigabytes for thousands of long responses."""
    one, other = Sent(), Sent()
    monkeypatch.setattr(agent_loop, "ray", SimpleNamespace(get=lambda refs: refs))
    manager = object.__new__(MuxAgentLoopManager)
    manager._worker_of = {"a": one, "b": other, "c": one}
    calls = {group: {0: [{"token_ids": [1]}]} for group in ("a", "b", "elsewhere")}
    manager.launch([Launch(group, 0) for group in ("a", "b", "c")], None, calls)
    assert (one.known, other.known) == ({"a": calls["a"]}, {"b": calls["b"]})
