"""Where a job's ranks run; which actors are asked whether they live; when a host counts as lost. Ray and the network are
stand-ins, but for the actors that die under a real Ray."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import tempfile
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError

pytest.importorskip("verl")
pytest.importorskip("ray")
from verl.trainer.ppo.utils import Role

from tests.trainer.dying_actors import KILLED, MARK
from tests.trainer.fencing import Fencing
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import Failure, UserError
from verl_mux.places.place import Place
from verl_mux.places.ray_nodes import PlacedPool, RayNode
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer import job_hosts
from verl_mux.trainer.job_hosts import ActorWatch, DeadActor, HostWatch, PlacedPools, actors_of_rollout, end_process
from verl_mux.trainer.phases import Phases
from verl_mux.warm.engine_processes import VARIABLE

LIMIT_S = 60.0


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
    monkeypatch.setenv(UID_VARIABLE, "mine")
    queue = {("TransferQueueController", "transfer_queue_mine"): Actor(), ("TransferQueueStorageUnit#0", None): Actor()}
    here = ["TransferQueueStorageUnit#0", "a tool's"]
    util = SimpleNamespace(list_named_actors=lambda: here)
    stand_in = SimpleNamespace(wait=wait, get=get, util=util, get_actor=lambda name, space=None: queue[name, space])
    monkeypatch.setattr(job_hosts, "ray", stand_in)
    return queue


def watched(actors: dict) -> tuple[ActorWatch, list[str]]:
    """A watch that was entered, and what it ended the process for; it has come to its end by itself."""
    ended: list[str] = []
    with ActorWatch(actors, lambda dead: ended.append(str(dead)), every_s=0.0, patience_s=0.0) as watch:
        watch._thread.join(LIMIT_S)
    return watch, ended


def test_all_are_asked_that_a_rollout_needs_and_no_tool(ray):
    balancer, *servers = (Actor() for _ in range(4))
    loops, rewards = [Actor()], [Actor(), Actor()]
    replicas = [SimpleNamespace(replica_rank=0, servers=servers[:2]), SimpleNamespace(replica_rank=1, servers=servers[2:])]
    engines = SimpleNamespace(global_load_balancer=balancer, get_replicas=lambda: replicas)
    controller, unit = ray.values()
    judge = SimpleNamespace(rollout_replicas=[SimpleNamespace(replica_rank=0, servers=["judge"])])
    trainer = SimpleNamespace(
        reward_loop_manager=SimpleNamespace(reward_model_manager=judge), teacher_model_manager=SimpleNamespace()
    )
    assert actors_of_rollout(engines, loops, rewards, job_hosts.own_replicas(trainer)) == {
        "server 0 of replica 0 of the reward model": "judge",
        "the load balancer": balancer, "server 0 of replica 0": servers[0], "server 1 of replica 0": servers[1],
        "server 0 of replica 1": servers[2], "agent loop worker 0": loops[0], "reward worker 0": rewards[0],
        "reward worker 1": rewards[1], "TransferQueueController": controller, "TransferQueueStorageUnit#0": unit,
    }  # fmt: skip


def test_the_trainer_gets_the_names_of_dead_actors_and_the_cause():
    why = ActorDiedError()
    watch, ended = watched({"reward worker 0": Actor(), "reward worker 1": Actor(why), "the load balancer": Actor(why)})
    with pytest.raises(DeadActor, match="no rollout can end any more: .*reward worker 1") as heard:
        watch.check()
    assert "the load balancer" in str(heard.value) and "reward worker 0" not in str(heard.value)
    assert heard.value.__cause__ is why
    assert ended == [str(heard.value)]  # of a trainer that does not leave


def test_a_busy_actor_is_asked_once_and_one_that_answers_in_every_round():
    busy, quick = Actor(None), Actor()
    watch = ActorWatch({"busy": busy, "quick": quick}, end=lambda dead: None)
    assert [watch._look() for _ in range(3)] == [None] * 3
    assert (busy.asked, quick.asked) == (1, 3)
    busy.answer = ActorDiedError()
    assert str(watch._look()) == "no rollout can end any more: busy died"


def test_an_actor_that_cannot_be_reached_for_a_moment_is_asked_again():
    actor = Actor(ActorUnavailableError("no connection", None))
    watch = ActorWatch({"it": actor}, end=print)
    assert watch._look() is None
    actor.answer = True
    assert watch._look() is None and actor.asked == 2


def test_one_that_leaves_is_not():
    dying, ended = Actor(), []
    with ActorWatch({"it": dying}, ended.append, every_s=0.0, patience_s=LIMIT_S) as watch:
        dying.answer = ActorDiedError()
        with pytest.raises(DeadActor):
            while watch._thread.is_alive():
                watch.check()
    assert not watch._thread.is_alive() and not ended


def test_no_actor_is_asked_after_the_last_step():
    actor = Actor()
    with ActorWatch({"it": actor}, end=lambda dead: None, every_s=LIMIT_S) as watch:
        pass
    assert not watch._thread.is_alive() and not actor.asked


@pytest.mark.parametrize("died", [True, False])
def test_a_trainer_that_asked_a_dead_actor_gets_its_name(died):
    asked = ActorDiedError()
    actors = {"agent loop worker 0": Actor(), "agent loop worker 1": Actor(asked if died else True)}
    watch = ActorWatch(actors, end=lambda dead: None, every_s=LIMIT_S)
    with pytest.raises(DeadActor if died else ActorDiedError) as heard, watch:
        raise asked
    assert not died or str(heard.value) == "no rollout can end any more: agent loop worker 1 died"


@pytest.mark.parametrize("refuses", [False, True], ids=["reported", "no coordinator"])
def test_the_end_of_the_process_is_reported_first_and_comes_in_any_case(monkeypatch, refuses):
    mux, exits = Fencing(), []
    phases, fail = Phases(mux, NULL_LOG), mux.fail
    phases.begin("rollout", 1)
    monkeypatch.setattr(mux, "fail", lambda reason: 1 / 0 if refuses else fail(reason))
    monkeypatch.setattr(job_hosts.os, "_exit", lambda code: exits.append((code, mux.failed)))
    with pytest.raises(ZeroDivisionError) if refuses else contextlib.nullcontext():  # had the process not ended
        end_process(phases, DeadActor("no rollout can end any more: it died"))
    assert exits == [(1, None if refuses else "no rollout can end any more: it died")]


# ---------------------------------------------------------------- hosts

ALPHA, BETA = ("10.0.0.1", 7001), ("10.0.0.2", 7002)
HOSTS = {"the host of t0 (10.0.0.1)": ALPHA, "the host of t1 (10.0.0.2)": BETA}


def test_each_other_host_of_the_jobs_nodes_is_looked_after_once():
    cluster = [
        RayNode("10.0.0.1", 8, {"mux_t0": 1}, 7001), RayNode("10.0.0.2", 8, {"mux_t1": 1, "mux_r1": 1}, 7002),
        RayNode("10.0.0.3", 8, {"mux_r0": 1}, 7003), RayNode("10.0.0.4", 8, {"mux_somebody_elses": 1}, 7004),
    ]  # fmt: skip
    found = job_hosts.hosts_of({node: Place(host="h") for node in ("r0", "r1", "t0", "t1")}, cluster, here="10.0.0.3")
    assert found == {"the host of t0 (10.0.0.1)": ALPHA, "the host of r1 and t1 (10.0.0.2)": BETA}


def test_without_bound_nodes_no_host_is_watched():
    before = threading.active_count()
    HostWatch(job_hosts.hosts_of({"r0": Place()}, [RayNode("10.0.0.1", 8)], here="10.0.0.3"), 1.0, end=print).close()
    assert threading.active_count() == before


class Network:
    """Answers to one host's connections in turn, the last one for ever; the other host always answers. A look takes a second."""

    def __init__(self, monkeypatch, *answers: Exception | None, host=BETA):
        self.asked, self.now = 0, 0.0
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self._host, self.enough = host, threading.Event()
        monkeypatch.setattr(job_hosts.socket, "create_connection", self.connect)
        monkeypatch.setattr(job_hosts.time, "monotonic", lambda: self.now)

    def connect(self, address, timeout):
        if address == self._host:
            self.asked, self.now = self.asked + 1, self.now + 1.0
            if self.asked == 50:
                self.enough.set()
            if (answer := next(self._answers)) is not None:
                raise answer
        return socket.socket()


def lost(network: Network, limit_s: float) -> list[str]:
    """What the process was ended for, at once or within fifty looks."""
    ended: list[str] = []

    def end(error: Failure) -> None:
        ended.append(str(error))
        network.enough.set()

    watch = HostWatch(HOSTS, limit_s, end, every_s=0.0)
    assert network.enough.wait(LIMIT_S)
    watch.close()
    return ended


@pytest.mark.parametrize("why", [TimeoutError(), OSError(errno.EHOSTUNREACH, ""), OSError(errno.ENETUNREACH, "")])
def test_a_host_that_is_cut_off_for_longer_than_a_lease_ends_the_process(monkeypatch, why):
    network = Network(monkeypatch, None, why)
    assert lost(network, 10.0) == ["the host of t1 (10.0.0.2) could not be reached for 10 s"]
    assert network.asked == 12


@pytest.mark.parametrize(
    "answers",
    [
        [None, *[TimeoutError()] * 9, None],  # a shorter cut
        [None, ConnectionRefusedError(errno.ECONNREFUSED, "")],  # a host that refuses is there
        [None, OSError(errno.EMFILE, "")],  # what lacks here says nothing of it
        [TimeoutError()],  # one that never answered
    ],
)
def test_nothing_else_ends_it(monkeypatch, answers):
    assert lost(Network(monkeypatch, *answers), 10.0) == []


def test_a_pause_of_the_process_itself_is_no_silence_of_others(monkeypatch):
    network = Network(monkeypatch, None, TimeoutError(), None)
    connect = network.connect

    def stopped(address, timeout):
        if network.asked == 1 and address == BETA:
            network.now += 1000.0
        return connect(address, timeout)

    monkeypatch.setattr(job_hosts.socket, "create_connection", stopped)
    assert lost(network, 10.0) == []


def test_no_process_is_ended_after_the_watch_was_closed(monkeypatch):
    network, ended = Network(monkeypatch, None, TimeoutError()), []
    watch = HostWatch(HOSTS, 1000.0, ended.append, every_s=0.0)
    assert network.enough.wait(LIMIT_S)
    watch.close()
    assert ended == []


# ---------------------------------------------------------------- set-up

PLACES = {name: Place(host=name) for name in ("r0", "t0", "t1")}


@pytest.fixture
def ray_has(monkeypatch):
    """The Ray cluster offers these GPUs by mux node, on hosts with these addresses."""

    def given(**nodes: tuple[str, int]) -> None:
        found = [RayNode(address, gpus, {f"mux_{name}": 1}) for name, (address, gpus) in nodes.items()]
        monkeypatch.setattr(job_hosts, "ray_nodes", lambda: found)

    return given


def client(rollout: list[str], train: list[str]) -> SimpleNamespace:
    return SimpleNamespace(address="tcp://h:1", nodes={"rollout": rollout, "train": train}, place=PLACES.__getitem__)


CONFIG = OmegaConf.create({"trainer": {"n_gpus_per_node": 4}, "actor_rollout_ref": {"rollout": {"n_gpus_per_node": 2}}})


def test_nodes_come_in_the_order_in_which_verl_will_count_their_ranks(ray_has):
    ray_has(r0=("10.0.0.5", 2), t0=("10.0.0.9", 4), t1=("10.0.0.10", 4))
    assert job_hosts.settle_nodes(client(["r0"], ["t0", "t1"]), CONFIG, colocated=False) == (["r0"], ["t1", "t0"], PLACES)


def test_both_pools_of_a_job_on_one_node_need_its_gpus_together(ray_has):
    ray_has(t0=("10.0.0.9", 5))
    with pytest.raises(UserError, match="asks for 6 GPUs there, but its Ray node 10.0.0.9 offers 5"):
        job_hosts.settle_nodes(client(["t0"], ["t0"]), CONFIG, colocated=False)
    assert job_hosts.settle_nodes(client(["t0"], ["t0"]), CONFIG, colocated=True)[1] == ["t0"]


def test_without_a_coordinator_ray_is_not_asked(monkeypatch):
    monkeypatch.setattr(job_hosts, "ray_nodes", lambda: pytest.fail("asked"))
    alone = job_hosts.settle_nodes(LocalMux("a", {"rollout": ["rollout0"], "train": ["train0"]}), CONFIG, colocated=False)
    assert alone == (["rollout0"], ["train0"], {})


def test_pools_are_placed_on_the_training_nodes():
    mapping = {Role.Actor: "global_pool", Role.TeacherModel: "teacher_pool"}
    manager = job_hosts.ResourcePoolManager({"global_pool": [4, 4], "teacher_pool": [2]}, mapping)
    left = []
    nodes = {"t0": (PLACES["t0"], 0), "t1": (PLACES["t1"], 0)}
    placed = PlacedPools(manager.resource_pool_spec, manager.mapping, nodes=nodes, before_own=lambda: left.append(1))
    placed._check_resource_available = lambda: None
    placed.create_resource_pool()
    pool = placed.get_resource_pool(Role.Actor)
    assert isinstance(pool, PlacedPool) and pool.store == [4, 4] and pool.max_colocate_count == manager.max_colocate_count
    assert pool._nodes == nodes and not pool.use_gpu and not left
    own = placed.get_resource_pool(Role.TeacherModel)
    assert (own.accelerator_type, own.use_gpu, own.store) == ("mux_own", True, [2])
    assert left == [1], "no lease covers it, and none is held while it starts"


def test_gpus_of_its_own_are_counted_before_it_starts(ray_has):
    config = OmegaConf.merge(CONFIG, {"distillation": {"enabled": True, "nnodes": 1, "n_gpus_per_node": 2}})
    ray_has(r0=("10.0.0.5", 2), t0=("10.0.0.9", 4), t1=("10.0.0.10", 4))
    with pytest.raises(
        UserError, match="asks for 2 GPUs of its own, and Ray has 0: start Ray with --resources='{\"mux_own\": 1}'"
    ):
        job_hosts.settle_nodes(client(["r0"], ["t0", "t1"]), config, colocated=False)
    ray_has(r0=("10.0.0.5", 2), t0=("10.0.0.9", 4), t1=("10.0.0.10", 4), own=("10.0.0.7", 2))
    assert job_hosts.settle_nodes(client(["r0"], ["t0", "t1"]), config, colocated=False)[0] == ["r0"]


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"resume_mode": "auto"}, "checkpoints/global_step_7"),
        ({"resume_mode": "auto", "default_local_dir": "elsewhere"}, None),
        ({"resume_mode": "disable"}, None),
        ({"resume_mode": "resume_path", "resume_from_path": "old/global_step_3"}, "old/global_step_3"),
    ],
)
def test_the_checkpoint_is_the_one_that_verl_will_load(tmp_path, monkeypatch, trainer, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "global_step_7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    config = OmegaConf.create({"trainer": {"default_local_dir": "checkpoints", **trainer}})
    assert job_hosts.checkpoint_to_resume(config) == (expected and str(tmp_path / expected))


# ---------------------------------------------------------------- actors that die under a real Ray


NAMES = [
    "TransferQueueController", "TransferQueueStorageUnit#0", "agent loop worker 0", "agent loop worker 1", "reward worker 0",
    "reward worker 1", "server 0 of replica 0", "server 0 of replica 1", "the load balancer",
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("forks", [False, True], ids=["started", "forked"])
def test_the_trainer_hears_of_an_actor_that_died_though_it_asks_it_nothing_and_is_ended_if_it_cannot(forked, forking, forks):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets lie deep in it, and have a limit to their names
        environment = {"VERL_PLATFORM": "cpu", "RAY_TMPDIR": folder, "RAY_ADDRESS": None, VARIABLE: forking[-1] if forks else ""}
        ended = forked("-m", "tests.trainer.dying_actors", timeout=300, **environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    heard = [f"no rollout can end any more: {name} died; ActorDiedError" for name in KILLED]
    said = [line.partition(MARK)[2] for line in ended.stdout.splitlines() if MARK in line]  # Ray may have begun the line
    assert said == [", ".join(NAMES), *heard, "ActorDiedError"], ended.stderr[-3000:]
