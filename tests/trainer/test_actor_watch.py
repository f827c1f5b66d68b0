"""Who is asked whether it lives, what the trainer hears, and when its process is ended; Ray is a stand-in."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.trainer.fencing import Fencing
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer import actor_watch
from verl_mux.trainer.actor_watch import ActorWatch, DeadActor, actors_of_rollout, end_process
from verl_mux.trainer.phases import Phases

NOBODY_COMES = 60.0


class Actor:
    """`answer`: what it says to being asked; None: nothing yet."""

    def __init__(self, answer: object = True) -> None:
        self.answer, self.asked = answer, 0
        self.__ray_ready__ = SimpleNamespace(remote=self._ask)

    def _ask(self):
        self.asked += 1
        return (self, self.asked)


def wait(asked, num_returns, timeout):
    assert num_returns == len(asked) and timeout is not None
    return [it for it in asked if it[0].answer is not None], [it for it in asked if it[0].answer is None]


def get(asked):
    if isinstance(asked[0].answer, Exception):
        raise asked[0].answer
    return asked[0].answer


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    queue = {("TransferQueueController", "transfer_queue"): Actor(), ("TransferQueueStorageUnit#0", "here"): Actor()}
    others = {("a tool's", "here"): Actor(ActorDiedError())}
    named = [{"name": name, "namespace": space} for name, space in queue | others]
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: named if all_namespaces else [])
    stand_in = SimpleNamespace(wait=wait, get=get, util=util, get_actor=lambda name, namespace: queue[name, namespace])
    monkeypatch.setattr(actor_watch, "ray", stand_in)
    return queue


def watched(actors: dict, patience_s: float = 0.0) -> tuple[ActorWatch, list[str]]:
    """A watch that was entered, and what it ended the process for; it has come to its end by itself."""
    ended: list[str] = []
    watch = ActorWatch(actors, lambda dead: ended.append(str(dead)), every_s=0.0, patience_s=patience_s)
    with watch:
        watch._thread.join(NOBODY_COMES)
    return watch, ended


def test_all_are_asked_that_a_rollout_needs_and_no_tool(ray):
    balancer, *servers = (Actor() for _ in range(4))
    loops, rewards = [Actor()], [Actor(), Actor()]
    replicas = [SimpleNamespace(replica_rank=0, servers=servers[:2]), SimpleNamespace(replica_rank=1, servers=servers[2:])]
    trainer = SimpleNamespace(
        agent_loop_manager=SimpleNamespace(agent_loop_workers=loops), get_reward_handles=lambda: rewards,
        rollout_server_manager=SimpleNamespace(global_load_balancer=balancer, get_replicas=lambda: replicas),
    )  # fmt: skip
    controller, unit = ray.values()
    assert actors_of_rollout(trainer) == {
        "the load balancer": balancer, "server 0 of replica 0": servers[0], "server 1 of replica 0": servers[1],
        "server 0 of replica 1": servers[2], "agent loop worker 0": loops[0], "reward worker 0": rewards[0],
        "reward worker 1": rewards[1], "TransferQueueController": controller, "TransferQueueStorageUnit#0": unit,
    }  # fmt: skip
    trainer.get_reward_handles = lambda: None  # rewards are computed elsewhere
    assert not [name for name in actors_of_rollout(trainer) if name.startswith("reward")]


def test_the_trainer_hears_who_died_and_why():
    why = ActorDiedError()
    watch, _ = watched({"reward worker 0": Actor(), "reward worker 1": Actor(why), "the load balancer": Actor(why)})
    with pytest.raises(DeadActor, match="no rollout can end any more: .*reward worker 1") as heard:
        watch.check()
    assert "the load balancer" in str(heard.value) and "reward worker 0" not in str(heard.value)
    assert heard.value.__cause__ is why


def test_who_is_busy_is_asked_once_and_who_answers_again_and_again():
    busy, quick = Actor(None), Actor()
    watch = ActorWatch({"busy": busy, "quick": quick}, end=lambda dead: None)
    assert [watch._look() for _ in range(3)] == [None] * 3
    assert (busy.asked, quick.asked) == (1, 3)
    busy.answer = ActorDiedError()
    assert str(watch._look()) == "no rollout can end any more: busy died"


def test_who_cannot_be_reached_for_a_moment_is_asked_again():
    actor = Actor(ActorUnavailableError("no connection", None))
    watch = ActorWatch({"it": actor}, end=lambda dead: None)
    assert watch._look() is None
    actor.answer = True
    assert watch._look() is None
    watch.check()


def test_a_trainer_that_does_not_leave_is_ended():
    _, ended = watched({"TransferQueueController": Actor(ActorDiedError())})
    assert ended == ["no rollout can end any more: TransferQueueController died"]


def test_one_that_leaves_is_not():
    dying, ended = Actor(), []
    with ActorWatch({"it": dying}, ended.append, every_s=0.0, patience_s=NOBODY_COMES) as watch:
        dying.answer = ActorDiedError()
        with pytest.raises(DeadActor):
            while watch._thread.is_alive():
                watch.check()
    assert not watch._thread.is_alive() and not ended


def test_nobody_is_asked_any_more_after_the_last_step():
    actor = Actor()
    with ActorWatch({"it": actor}, end=lambda dead: None, every_s=NOBODY_COMES) as watch:
        pass
    assert not watch._thread.is_alive() and not actor.asked


@pytest.mark.parametrize("died", [True, False])
def test_one_that_asked_the_dead_hears_who_that_was(died):
    asked = ActorDiedError()
    actors = {"agent loop worker 0": Actor(), "agent loop worker 1": Actor(asked if died else True)}
    watch = ActorWatch(actors, end=lambda dead: None, every_s=NOBODY_COMES)
    with pytest.raises(DeadActor if died else ActorDiedError) as heard, watch:
        raise asked
    assert not died or str(heard.value) == "no rollout can end any more: agent loop worker 1 died"


@pytest.mark.parametrize("refuses", [False, True], ids=["told", "nobody to tell"])
def test_the_end_of_the_process_is_told_first_and_comes_in_any_case(monkeypatch, refuses):
    mux, exits = Fencing(), []
    phases = Phases(mux, NULL_LOG)
    phases.begin("rollout", 1)
    fail = mux.fail
    monkeypatch.setattr(mux, "fail", lambda reason: 1 / 0 if refuses else fail(reason))
    monkeypatch.setattr(actor_watch.os, "_exit", lambda code: exits.append((code, mux.failed)))
    end = functools.partial(end_process, phases, DeadActor("no rollout can end any more: it died"))
    if refuses:
        with pytest.raises(ZeroDivisionError):  # had the process not ended
            end()
    else:
        end()
    assert exits == [(1, None if refuses else "no rollout can end any more: it died")]
