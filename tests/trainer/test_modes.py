"""What the trainer modes report and when they take a lease, on stand-ins of worker groups and engines."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.trainer.fencing import Fencing, bare_trainer, made_buffer, made_ready
from verl_mux.coordinator.bus.client import Lease, LeaseLost, connect
from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import Failure, UserError
from verl_mux.memory.tags import Moved
from verl_mux.places.place import Location, Place
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control.replica_plan import Unit
from verl_mux.trainer import job_hosts
from verl_mux.trainer.job_hosts import ActorWatch, DeadActor
from verl_mux.trainer.phases import Phases
from verl_mux.trainer.rollout_engines import RolloutEngines
from verl_mux_cpu.device_ledger import DeviceFull

NODES = {"rollout": ["r0", "r1"], "train": ["t0", "t1"]}


def group(*ranks):
    """A worker group whose ranks hold these bytes of parameters once they are awake."""
    moved = [{"params": Moved(held, held, 0.5)} for held in ranks]
    return SimpleNamespace(mux_wake=lambda token: moved)


@pytest.fixture
def trainer():
    """A trainer of two rollout and two training nodes that went through no set-up."""
    return bare_trainer(NODES)


@pytest.fixture
def memory(trainer):
    """Bytes of the job by node and tag, as the coordinator shows them."""
    pools = {side: {"nodes": [{"name": name} for name in names]} for side, names in NODES.items()}
    with Coordinator(make_config({"pools": pools})) as coordinator:
        trainer.phases = Phases(connect(coordinator.address, "a", NODES, uid="a:1"), NULL_LOG)

        def shown(where="memory"):
            trainer.phases.mux.release(trainer.phases.mux.acquire("train", step=1))  # earlier messages have arrived
            pools = coordinator.snapshot()["pools"].values()
            if where == "host_memory":
                held = {name: node[where]["jobs"] for pool in pools for name, node in pool["nodes"].items()}
                return {name: jobs["a"]["measured"] if jobs else {} for name, jobs in held.items()}
            return {name: node["memory"].get("a", {}) for pool in pools for name, node in pool["nodes"].items()}

        yield shown
        trainer.phases.mux.close()


def test_each_training_node_shows_what_its_own_ranks_hold(trainer, memory):
    trainer.train_groups = lambda: [group(10, 20, 30, 40), group(1, 2, 3, 4)]
    trainer.phases.lease = Lease(1, NODES["train"], "train", 1, 0.0, 0.0)
    trainer.wake_states()
    assert memory() == {"r0": {}, "r1": {}, "t0": {"params": 33}, "t1": {"params": 77}}
    # All ranks move at the same time, one group after the other.
    assert trainer.phases.take_seconds() == {"wake": 1.0}


def test_a_process_reports_what_it_holds_of_its_hosts_memory_once_whatever_groups_it_is_in(trainer, memory):
    ranks = [Member("h", rank, 1, "b") for rank in range(4)]
    actor, critic = [[(process, {"private": size}) for process in ranks] for size in (10, 10)]
    trainer.train_groups = lambda: [SimpleNamespace(mux_host_memory=lambda noted=noted: noted) for noted in (actor, critic)]
    engine = ("r1", Member("h", 9, 1, "b"), {"private": 5, "shared": 7})
    trainer.rollout_server_manager = SimpleNamespace(each=lambda verb, ranks: [engine])
    trainer._report_host_memory()
    assert memory("host_memory") == {"t0": {"private": 20}, "t1": {"private": 20}, "r0": {}, "r1": {"private": 5, "shared": 7}}


def test_each_rollout_node_shows_what_its_own_engines_hold(trainer, memory):
    awake = [("r0", {"weights": Moved(5, 5, 0.1)}), ("r1", {"weights": Moved(7, 7, 0.3)})]
    asleep = [("r1", {"weights": Moved(7, 0, 0.1)})]
    manager = SimpleNamespace(each=lambda verb, ranks, *_: asleep if ranks == (1,) else awake)
    engines = RolloutEngines(manager, None, trainer.phases)
    engines._move("wake", ["weights"])
    assert memory() == {"r0": {"weights": 5}, "r1": {"weights": 7}, "t0": {}, "t1": {}}
    engines.part(Unit(("r1",), (1,), ("s1",)))
    assert memory() == {"r0": {"weights": 5}, "r1": {}, "t0": {}, "t1": {}}
    assert trainer.phases.take_seconds() == {"wake": 0.3, "sleep": 0.1}


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_a_lease_fenced_while_its_memory_goes_to_sleep_goes_back_asleep(trainer, phase):
    mux, asked = Fencing(), []
    trainer.phases, trainer.timing_raw, trainer._rollout_began = Phases(mux, NULL_LOG), {}, 0.0
    lease = trainer.phases.begin(phase, 1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        fences = []

        def pause(_lease):
            mux.usable.set()  # the coordinator answers again
            return lambda: asked.append("awake again")

        def sleep(*_):
            mux.usable.clear()
            fences.append(pool.submit(mux.fence))
            return []

        trainer.phases.guard(pause)
        trainer.engines = RolloutEngines(SimpleNamespace(each=sleep), None, trainer.phases)
        trainer.train_groups = lambda: [SimpleNamespace(mux_sleep=sleep)]
        mux.release = lambda given_back: asked.append(given_back)
        trainer._end_rollout() if phase == "rollout" else trainer.on_step_end()
        fences[0].result(60)
    assert asked == [lease]


@pytest.mark.parametrize("waits_by", ["refilling", "waiting"])
def test_a_rollout_that_lost_an_actor_ends_its_job_instead_of_going_on_for_ever(trainer, monkeypatch, waits_by):
    def rollout(self, agent_loop_manager):
        """As verl does while every sample fails, or none comes."""
        self.phases.begin("rollout", 1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self._add_prompts_to_generate(1) if waits_by == "refilling" else self.replay_buffer.report_progress(0)

    lost = DeadActor("no rollout can end any more: reward worker 0 died")
    trainer.phases, trainer.config = Phases(Fencing(), NULL_LOG), OmegaConf.create()
    monkeypatch.setattr(PPOTrainer, "fit", rollout)
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, num_prompts: num_prompts)
    made_ready(trainer, monkeypatch)
    trainer.replay_buffer = made_buffer()
    monkeypatch.setattr(job_hosts, "ActorWatch", functools.partial(ActorWatch, every_s=0.0))
    monkeypatch.setattr(ActorWatch, "_look", lambda self: lost)
    with pytest.raises(DeadActor):
        trainer.fit(SimpleNamespace(agent_loop_workers=[]))
    # The coordinator shows which actor died as the reason.
    assert trainer.phases.mux.failed == str(lost)


@pytest.mark.parametrize("raised", [None, ValueError("what a library says")], ids=["well", "badly"])
def test_each_server_removes_its_files_from_its_host_however_the_job_ends(trainer, monkeypatch, raised):
    def ends(self, agent_loop_manager):
        if raised is not None:
            raise raised

    asked = []
    trainer.phases, trainer.config = Phases(Fencing(), NULL_LOG), OmegaConf.create()
    trainer.phases.mux.close = lambda *_: asked.append("leases are back")
    monkeypatch.setattr(PPOTrainer, "fit", ends)
    made_ready(trainer, monkeypatch)
    trainer.rollout_server_manager = SimpleNamespace(each=lambda verb, ranks: asked.append((verb, ranks)))
    with nullcontext() if raised is None else pytest.raises(ValueError, match="library"):
        trainer.fit(SimpleNamespace(agent_loop_workers=[]))
    assert asked == ["leases are back", ("forget", None)]


FULL = DeviceFull("out of memory on r0: held by code")


@pytest.mark.parametrize(
    ("raised", "noted"),
    [
        (Failure("replica 0 could not start: no room"), "replica 0 could not start: no room"),
        (RayTaskError("mux_sleep", "Traceback ...", FULL).as_instanceof_cause(), "out of memory on r0: held by code"),
        (ValueError("what a library says"), "its driver ended with ValueError"),
    ],
    ids=["of its own", "of an actor", "another"],
)
def test_a_failure_is_reported_to_the_coordinator_in_its_words(trainer, monkeypatch, raised, noted):
    def fail(self):
        self.phases.begin("init", 0)
        raise raised

    trainer.phases = Phases(Fencing(), NULL_LOG)
    monkeypatch.setattr(PPOTrainer, "init", fail)
    with pytest.raises(type(raised)):
        trainer.init()
    assert trainer.phases.mux.failed == noted


PASSES = {
    "_compute_ref_log_prob": events.REF, "_compute_values": events.VALUES, "_update_critic": events.UPDATE_CRITIC,
    "_compute_advantage": events.ADV, "_update_actor": events.UPDATE_ACTOR,
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_over_a_batch_is_logged_and_needs_a_lease_that_may_be_used(trainer, monkeypatch, name):
    logged, passed = [], []
    trainer.phases = Phases(Fencing(), SimpleNamespace(log=lambda event, *_, **__: logged.append(event)))
    monkeypatch.setattr(PPOTrainer, name, lambda self, batch, metrics: passed.append(batch) or batch)
    assert getattr(trainer, name)("batch", {}) == "batch"
    assert (logged, passed) == ([PASSES[name]], ["batch"])
    trainer.phases.mux.failed = "evicted"
    with pytest.raises(LeaseLost):
        getattr(trainer, name)("batch", {})
    assert passed == ["batch"]


def test_the_init_lease_is_taken_before_any_group_touches_its_device_and_once(trainer):
    begun = []
    trainer.phases = SimpleNamespace(lease=None, mux=SimpleNamespace(members=begun.append, note=begun.append))

    def begin(phase, step, nodes):
        begun.append((phase, nodes, hasattr(trainer, "critic_wg")))
        trainer.phases.lease = phase

    trainer.phases.begin = begin
    trainer.critic_wg = critic = started("hosta", "hostb")
    trainer.actor_rollout_wg = actor = group()
    # On its own side's nodes alone, and the coordinator knows by then whose processes will hold their memory.
    assert begun == [["process 0", "process 1"], ("init", ("t0", "t1"), False), "loading the model"]
    assert trainer.train_groups() == [actor, critic]


def started(*hosts):
    """A worker group whose ranks run on these hosts and have touched no device."""
    return SimpleNamespace(mux_where=lambda: [(Location(host), f"process {rank}") for rank, host in enumerate(hosts)])


def test_ranks_on_other_hosts_than_their_nodes_get_no_lease(trainer):
    places = {"t0": Place(host="hosta"), "t1": Place(host="hostb")}
    trainer.settings = msgspec.structs.replace(trainer.settings, places=places)
    trainer.phases = SimpleNamespace(lease=None)
    with pytest.raises(UserError, match=r"rank 1 works for node 't1' \(host hostb\), but runs on hosta"):
        trainer.actor_rollout_wg = started("hosta", "hosta")
    assert not hasattr(trainer, "actor_rollout_wg")


# ---------------------------------------------------------------- a lease that may not be used for a while

MOVES = {"params": Moved(1, 1, 0.1)}


class Job:
    """A trainer that went through no set-up, with two replicas, actor and critic. `asked`: what it asks of them, in order."""

    def __init__(self, sleep_level="auto"):
        self.asked = []
        phases = Phases(Fencing(), NULL_LOG)
        nodes = {"rollout": ["r0", "r1"], "train": ["t0"]}
        self.trainer = trainer = bare_trainer(nodes, phases=phases, global_steps=5, states_are_awake=False, _rollout_began=0.0)
        manager = SimpleNamespace(
            get_replicas=lambda: [0, 1],
            each=lambda verb, ranks, *asked: self._asked_of_engines(verb, ranks, *asked),
        )
        sync = SimpleNamespace(update_weights=lambda version, token, asleep: dict(self.note("sync", version, *asleep)))
        trainer.engines = RolloutEngines(manager, sync, trainer.phases, sleep_level)
        trainer.train_groups = lambda: [self.group(name) for name in ("actor", "critic")]

    def group(self, name):
        noted = lambda verb: lambda *token: self.note(name, verb, *token) or [MOVES]  # noqa: E731
        return SimpleNamespace(**{f"mux_{verb}": noted(verb) for verb in ("sleep", "reopen", "wake")})

    def _asked_of_engines(self, verb, ranks, *asked):
        if verb == "sleep":
            return self.note(verb, asked[0], ranks, asked[1])
        if verb == "wake_up":
            return self.note("wake", asked[0], ranks)
        return self.note(verb, ranks, *(asked if verb == "pause" else ()))

    def note(self, *what):
        self.asked.append(what)
        return []

    def fenced(self):
        """Its lease may not be used for a while. Returns what was asked then, and what afterwards."""
        self.asked.clear()
        go_on = self.trainer.suspend(self.trainer.phases.lease)
        then = list(self.asked)
        self.asked.clear()
        go_on()
        return then, list(self.asked)


WAKE = [("wake", ["weights"], None), ("wake", ["kv_cache"], None)]


def test_a_suspended_rollout_keeps_its_weights_on_the_host_and_needs_no_sync():
    job = Job()
    job.trainer._begin_rollout(4)
    assert job.asked == [WAKE[0], ("sync", 4), WAKE[1]]
    for _ in range(2):
        assert job.fenced() == ([("pause", None, 1)], [("reopen", None), *WAKE])
    job.trainer._end_rollout()
    # What was on the host for its own sake is not taken for the next step's weights.
    job.trainer._begin_rollout(5)
    assert job.asked[-4:] == [("sleep", None, None, 2), WAKE[0], ("sync", 5), WAKE[1]]


def test_weights_that_may_not_stay_on_the_host_come_by_a_sync_to_those_that_are_left_too():
    job = Job(sleep_level="2")
    job.trainer._begin_rollout(4)
    assert job.fenced() == ([("pause", None, 2)], [("reopen", None), WAKE[0], ("sync", 4), WAKE[1]])
    job.trainer.engines.vacate(Unit(replicas=(1,), nodes=("r1",), servers=("s1",)))
    held = [(verb, tags, [0]) for verb, tags, _ in WAKE]
    assert job.fenced() == ([("pause", [0], 2)], [("reopen", [0]), held[0], ("sync", 4, 1), held[1]])


def test_the_first_weights_come_to_the_hosts_without_a_lease_and_engines_load_them_from_there_once():
    job = Job()
    job.trainer.engines.bring_to_hosts(4)
    assert job.asked == [("sync", 4, 0, 1)] and job.trainer.phases.lease is None
    job.trainer._begin_rollout(4)
    assert job.asked[1:] == [WAKE[0], ("load_synced", None), WAKE[1]]
    job.trainer._end_rollout()
    job.trainer._begin_rollout(5)
    assert job.asked[-2:] == [("sync", 5), WAKE[1]]


def test_a_rollout_that_gave_nodes_back_comes_back_on_the_others():
    job = Job()
    job.trainer._begin_rollout(4)
    job.trainer.engines.vacate(Unit(replicas=(1,), nodes=("r1",), servers=("s1",)))
    assert job.asked[-1] == ("sleep", None, (1,), 2)
    held = [(verb, tags, [0]) for verb, tags, _ in WAKE]
    assert job.fenced() == ([("pause", [0], 1)], [("reopen", [0]), *held])
    # Some of the engines have no copy, so after a validation too the next rollout begins with a sync.
    job.trainer._end_rollout(same_weights_next=True)
    job.trainer._begin_rollout(4)
    assert job.asked[-4:] == [("sleep", None, None, 2), WAKE[0], ("sync", 4), WAKE[1]]


def test_what_a_phase_has_not_taken_up_yet_is_left_to_it():
    """A worker refuses to reopen under a lease under which it was never woken, so this ended the job."""
    job = Job()
    for phase in ("rollout", "train"):
        job.trainer.phases.begin(phase, 5)
        assert job.fenced() == ([], [])
        job.trainer.phases.end()


def test_after_a_validation_whose_weights_are_on_the_host_a_suspension_changes_nothing():
    job = Job()
    job.trainer._begin_rollout(4)
    job.trainer._end_rollout(same_weights_next=True)
    job.trainer.phases.begin("rollout", 5)
    assert job.fenced() == ([], [])
    job.trainer.phases.end()
    job.trainer._begin_rollout(4)
    assert job.asked == WAKE


def test_a_suspended_training_phase_goes_to_the_host_with_all_its_models_and_comes_back_under_its_lease():
    job = Job()
    lease = job.trainer.phases.begin("train", 5)
    job.trainer.wake_states()
    slept, woken = job.fenced()
    assert slept == [("actor", "sleep"), ("critic", "sleep")]
    names = ("actor", "critic")
    assert woken == [*((name, "reopen", lease.token) for name in names), *((name, "wake", lease.token) for name in names)]
    job.trainer.sleep_states()
    assert job.fenced() == ([], [])
