"""Running jobs that the coordinator moves, on the state machine driven by hand: told, gone, back, and what may come between."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.coordinator.core.placement.placed_jobs import AUTO, lines, needs, placing_config, shown, where_told
from tests.coordinator.driver import Driver
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import placed_jobs
from verl_mux.coordinator.core.placed_jobs import Standing
from verl_mux.coordinator.core.placing import Answerer
from verl_mux.coordinator.core.records import DriverDied, JobState, MovesDue, ProcessesGone, State
from verl_mux.coordinator.core.state import IllegalMove, Machine, UnknownJob
from verl_mux.placement.estimator import Observed
from verl_mux.placement.placer import Move

OLD, NEW = {"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t1"]}
SHORT = Observed(rollout=(3.0, 3.0, 3.0), train=(3.0, 3.0, 3.0))
LAST = 4  # the step after which the job turns out so long that it must move


class Jobs(Driver):
    """The same with starts of a job told apart: `uids` by job, and the places where it was told to be."""

    def __init__(self, machine):
        super().__init__(machine)
        self.uids = {}

    def who(self, job, uid=None):
        uid = uid or f"{job}:{self.uids.get(job, 1)}"
        return {"job": job, "uid": uid, "client": f"{uid}-client"}

    def come(self, job, **keys):
        return self.register(job, nodes=AUTO, **{"needs": needs(), "slo": 1.3, "profiled": SHORT, **keys})

    def come_again(self, job, **keys):
        self.uids[job] = self.uids.get(job, 1) + 1
        return self.come(job, movable=True, **keys)

    def step(self, job, number, rollout=3.0, train=3.0):
        nodes = self.machine.state.jobs[job].nodes
        for phase, seconds in (("rollout", rollout), ("train", train)):
            self.ask(job, phase, number, nodes[phase])
            self.now += seconds - 1
            self.release(job)

    def beat(self, job):
        (ack,) = [said for said in self.do(m.Heartbeat(**self.who(job), beat=1)) if isinstance(said, m.HeartbeatAck)]
        return ack.move

    def leave(self, job, move, step=LAST):
        return self.do(m.Deregister(**self.who(job), reason="it moves", moving=move, step=step, saving_s=2.5))

    @property
    def state(self):
        return self.machine.state

    def pin(self, job):
        return next(pin for pin in self.state.placed.group_of(job).pins if pin.job.name == job)

    def place(self, job):
        return {"rollout": list(self.pin(job).rollout), "train": list(self.pin(job).train)}


def spoilt(**keys):
    """`a` and `b` share nodes; `b` turns out so long that it has to go, and is asked to."""
    driver = Jobs(Machine(placing_config(count=2, move_s=120.0, **keys)))
    driver.come("a")
    driver.come("b", movable=True)
    assert driver.state.jobs["b"].nodes == OLD
    for number in range(1, LAST + 1):
        driver.step("b", number, rollout=12.0, train=9.0)
    for number in range(1, LAST + 1):
        driver.step("a", number)
    return driver


def test_how_many_steps_are_left_stands_while_a_job_moves():
    driver = spoilt()
    move = driver.beat("b")
    driver.do(m.StepReport(**driver.who("b"), step=LAST, metrics={}, steps=10))

    def left():
        return Standing(driver.state, driver.now)["b"].left

    assert left() == 10 - LAST
    driver.leave("b", move)
    driver.come_again("b", steps=10)
    assert left() == 10 - LAST
    driver.ask("b", "rollout", LAST + 1, driver.state.jobs["b"].nodes["rollout"])
    assert left() == 10 - LAST


def test_nobody_is_moved_before_all_of_its_group_were_seen():
    driver = Jobs(Machine(placing_config(count=2)))
    driver.come("a")
    driver.come("b", movable=True)
    for number in range(1, LAST + 3):
        driver.step("b", number, rollout=12.0, train=9.0)
    assert not lines(driver, "move_asked")
    for number in range(1, LAST + 1):  # it takes what it said that it would; its first step teaches nothing
        assert not lines(driver, "move_asked")
        driver.step("a", number)
    assert [move["job"] for move in lines(driver, "move_asked")] == ["b"]


def test_a_job_that_spoils_its_group_is_asked_to_go_with_every_answer_to_a_heartbeat():
    driver = spoilt()
    (asked,) = lines(driver, "move_asked")
    assert (asked["job"], asked["nodes"], asked["before"], asked["expected_s"]) == ("b", NEW, OLD, 120.0)
    assert lines(driver, "slo_at_risk")[-1]["kind"] == "move"
    assert [driver.beat("b"), driver.beat("b"), driver.beat("a")] == [1, 1, 0]
    assert driver.place("b") == NEW and driver.state.jobs["b"].nodes == OLD
    driver.step("b", LAST + 1)  # it goes on where it is until its step ends
    assert driver.beat("b") == 1 and len(lines(driver, "move_asked")) == 1


def test_it_leaves_and_comes_back_where_its_place_was_kept_and_what_that_took_is_known():
    driver = spoilt()
    ended = driver.state.jobs["b"].watched.free_since  # the end of its last phase
    driver.now += 10
    (gone,) = driver.leave("b", driver.beat("b"))
    assert isinstance(gone, m.JobEnded) and driver.state.jobs["b"].state is JobState.ENDED
    (waits,) = driver.come("c", slo=1.0)
    assert isinstance(waits, m.Queued), "the only nodes that are free are kept for b"
    assert driver.beat("a") == 0 and driver.place("b") == NEW
    driver.now += 30
    assert where_told(driver.come_again("b")) == [NEW]
    driver.do(m.Deregister(**driver.who("b")))  # it only asked whether it would be taken
    assert where_told(driver.come("b", movable=True)) == [NEW]
    driver.ask("b", "init", 0, ["t1"])
    driver.release("b")
    driver.ask("b", "rollout", LAST, ["r1"], key="validation")
    driver.release("b")
    assert not lines(driver, "job_moved")
    driver.ask("b", "rollout", LAST + 1, ["r1"])
    (moved,) = [line for line in driver.logged if line.event == "job_moved"]
    assert moved.step == LAST + 1 and moved.extra["done"] == LAST and moved.extra["before"] == OLD
    assert moved.duration == pytest.approx(driver.now - ended + 2.5)
    assert not driver.state.moves and driver.beat("b") == 0
    assert driver.pin("b").job.move_s == moved.duration  # and the next one is expected to take as long


def test_what_was_learnt_of_it_stays_and_its_first_step_there_teaches_nothing():
    driver = spoilt()
    learnt = driver.state.jobs["b"].watched.observed
    driver.leave("b", 1)
    driver.come_again("b")
    watched = driver.state.jobs["b"].watched
    assert watched.observed == learnt and watched.began is not None
    driver.step("b", LAST + 1, rollout=500.0)
    assert watched.observed == learnt and watched.fresh == 0
    driver.step("b", LAST + 2, rollout=12.0, train=9.0)
    assert watched.observed.rollout == (*learnt.rollout, 12.0) and watched.fresh == 1
    assert lines(driver, "group_predicted")[-1]["nodes"] == NEW


def test_whoever_gets_the_nodes_that_it_leaves_is_told_so_when_it_has_left():
    driver = spoilt()
    (waits,) = driver.come("c", slo=2.0)
    assert isinstance(waits, m.Queued) and waits.reason == "job 'c' waits until b has left for other nodes"
    assert driver.place("c") == OLD and driver.state.jobs["c"].nodes == {}
    assert where_told(driver.leave("b", 1)) == [OLD]
    assert driver.state.jobs["c"].nodes == OLD


@pytest.mark.parametrize("end", ["finished", "died", "another move"])
def test_one_that_ends_instead_has_lost_its_place(end):
    driver = spoilt()
    driver.come("c", slo=1.0)
    if end == "died":
        driver.do(DriverDied(job="b", uid="b:1"))
        driver.do(ProcessesGone(job="b", uid="b:1"))
    else:
        driver.do(m.Deregister(**driver.who("b"), moving=7 if end == "another move" else 0))
    assert lines(driver, "move_given_up")[0]["job"] == "b" and not driver.state.moves
    assert driver.state.placed.group_of("b") is None
    assert driver.state.jobs["c"].nodes == NEW


def test_a_place_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(placed_jobs, "MOVE_TIMEOUT_S", 5.0)
    driver = spoilt()
    driver.leave("b", 1)
    driver.come("c", slo=1.0)
    driver.wait(4)
    assert driver.place("b") == NEW
    driver.wait(3)
    assert lines(driver, "move_given_up")[0]["reason"] == "it did not come back in time"
    assert driver.state.jobs["c"].nodes == NEW
    driver.do(m.Deregister(**driver.who("a")))
    (answer,) = driver.come_again("b", slo=10.0)  # late: placed like anybody, by what it brings
    assert isinstance(answer, m.Registered) and not driver.state.moves


def test_a_coordinator_that_was_down_has_waited_for_nobody(monkeypatch):
    monkeypatch.setattr(placed_jobs, "MOVE_TIMEOUT_S", 5.0)
    driver = spoilt()
    driver.leave("b", 1)
    driver.now += 1000
    driver.machine.resume(driver.now)
    driver.wait(4)
    assert driver.place("b") == NEW


def test_one_that_dies_on_its_return_has_lost_its_place():
    driver = spoilt()
    driver.leave("b", 1)
    driver.come_again("b")
    driver.ask("b", "init", 0, ["t1"])
    driver.do(DriverDied(job="b", uid="b:2"))
    driver.do(ProcessesGone(job="b", uid="b:2"))
    assert not driver.state.moves and driver.state.placed.group_of("b") is None


def test_another_job_under_its_name_is_placed_anew():
    driver = spoilt()
    driver.leave("b", 1)
    (waits,) = driver.come_again("b", needs=needs(train_nodes=2))
    assert isinstance(waits, m.Queued) and not driver.state.moves
    assert [entry.job.name for entry in driver.state.placed.waiting] == ["b"]
    assert lines(driver, "move_given_up")[0]["reason"] == "another job came under its name"


def test_a_start_of_it_in_the_other_trainer_mode_is_placed_anew():
    driver = spoilt()
    driver.leave("b", 1)
    assert where_told(driver.come_again("b", colocated=True)) == [{"rollout": ["t1"], "train": ["t1"]}]
    assert not driver.state.moves and driver.pin("b").job.colocated


def test_other_company_or_another_order_on_the_same_nodes_is_no_move():
    driver = spoilt()
    move = Move(job="a", kind="move", group="g1", rollout=("r0",), train=("t0",), load_s=9.0)
    assert placed_jobs.move_decided(driver.state, move, driver.now) == [] and "a" not in driver.state.moves


def test_who_is_on_the_way_is_not_moved_again():
    driver = spoilt()
    driver.do(MovesDue())
    driver.leave("b", 1)
    driver.do(MovesDue())
    assert len(lines(driver, "move_asked")) == 1
    progress = Standing(driver.state, driver.now)["b"]
    away_s = driver.now - driver.state.moves["b"].ended_at
    assert (progress.phase, progress.done) == ("loading", LAST) and progress.remaining_s == pytest.approx(120.0 - away_s)


def together(driver, cycles, first=1):
    """`a` and `b` roll out side by side on nodes of their own and take turns in training."""
    for number in range(first, first + cycles):
        for job in "ab":
            driver.ask(job, "rollout", number, driver.state.jobs[job].nodes["rollout"])
        driver.now += 1
        for job in "ab":
            driver.release(job)
            driver.ask(job, "train", number, driver.state.jobs[job].nodes["train"])
            driver.now += 2
            driver.release(job)


def test_jobs_placed_apart_by_a_wrong_profile_are_brought_together_once_that_pays():
    long_rollouts = Observed(rollout=(20.0,) * 3, train=(1.0,) * 3)
    driver = Jobs(Machine(placing_config(count=2, move_s=20.0)))
    for job in "ab":
        driver.come(job, profiled=long_rollouts, slo=1.8, movable=True)
    assert driver.state.jobs["b"].nodes["rollout"] == ["r1"]
    together(driver, 5)
    assert not lines(driver, "move_asked"), "they are too young for the saving to pay"
    assert driver.state.ask_again_at is not None
    together(driver, 20, first=6)
    driver.do(MovesDue())
    (asked,) = lines(driver, "move_asked")
    assert len(driver.state.placed.moved_at) == 1, "one of them goes to the other"
    (group,) = driver.state.placed.groups
    assert list(group.rollout_nodes) == asked["nodes"]["rollout"] and len(group.pins) == 2


def test_the_limit_of_moves_an_hour_outlives_the_placer():
    driver = Jobs(Machine(placing_config(count=2)))
    driver.state.placed = msgspec.structs.replace(driver.state.placed, moved_at=tuple(float(i) for i in range(60)))
    driver.come("a", movable=True)
    assert len(driver.state.placed.moved_at) == 60
    driver.planner = Answerer()  # as after a restart
    driver.do(MovesDue())
    assert len(driver.state.placed.moved_at) == 60


def test_the_status_says_in_a_sentence_where_a_move_stands():
    driver = spoilt()

    def told():
        return [line for line in shown(driver).splitlines() if line.startswith("job b moves")]

    assert told() == ["job b moves to r1, t1: asked 0 s ago, it leaves at the end of its step"]
    driver.leave("b", 1)
    driver.now += 7
    assert told() == [f"job b moves to r1, t1: it left 7 s ago after step {LAST}, and its place is kept"]
    driver.come_again("b")
    assert told() == [f"job b moves to r1, t1: it came back and has yet to begin step {LAST + 1}"]


WORDS = st.sampled_from(["beat", "step", "leave", "back", "look", "finish", "die", "gone", "other", "other ends", "wait", "due"])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(WORDS, max_size=20))
def test_in_any_history_a_job_on_its_way_has_a_place_and_a_restart_knows_it(monkeypatch, history):
    monkeypatch.setattr(placed_jobs, "MOVE_TIMEOUT_S", 20.0)
    driver = spoilt()
    others = iter(range(100))
    for word in history:
        try:
            _say(driver, word, others)
        except (IllegalMove, UnknownJob):
            continue
        open_ = {getattr(q, "name", None) or getattr(getattr(q, "job", None), "name", None) for q in driver.state.questions}
        for name, move in driver.state.moves.items():
            assert name in open_ or driver.state.placed.group_of(name) is not None
            job = driver.state.jobs.get(name)
            assert move.left_at is not None or job.state in (JobState.LIVE, JobState.SILENT, JobState.DYING)
        for job in driver.state.jobs.values():
            if job.nodes and job.state is JobState.LIVE and job.name not in driver.state.moves and job.watched:
                assert set(job.all_nodes) == {n for nodes in driver.place(job.name).values() for n in nodes}
    again = Machine(driver.machine.config)
    for event in driver.events:
        again.handle(event)
    assert again.state == driver.state == msgspec.msgpack.decode(msgspec.msgpack.encode(driver.state), type=State)


def _say(driver, word, others):
    job = driver.state.jobs.get("b")
    if word == "beat":
        driver.do(m.Heartbeat(**driver.who("b"), beat=1))
    elif word == "step" and job is not None and job.nodes and job.state is JobState.LIVE and not driver.state.leases_of("b"):
        driver.ask("b", "rollout", job.finished + 1 if job.finished else LAST + 1, job.nodes["rollout"])
        if driver.state.leases_of("b"):
            driver.release("b")
    elif word == "leave":
        driver.leave("b", driver.beat("b"))
    elif word == "back" and (job is None or job.state is JobState.ENDED):
        driver.come_again("b")
    elif word == "look":
        driver.come("b", movable=True)
        driver.do(m.Deregister(**driver.who("b")))
    elif word == "finish":
        driver.do(m.Deregister(**driver.who("b")))
    elif word == "die":
        driver.do(DriverDied(job="b", uid=driver.who("b")["uid"]))
    elif word == "gone":
        driver.do(ProcessesGone(job="b", uid=driver.who("b")["uid"]))
    elif word == "other":
        driver.come(f"o{next(others)}")
    elif word == "other ends":
        driver.do(m.Deregister(**driver.who("o0")))
    elif word == "wait":
        driver.wait(8)
    elif word == "due":
        driver.do(MovesDue())
