"""Jobs' clients, alone and through a coordinator."""

import asyncio
import json
import signal
import socket
import threading

import pytest

import verl_mux
from verl_mux.coordinator.bus import client as client_module
from verl_mux.coordinator.bus.client import Lease, LeaseLost, LocalMux, connect
from verl_mux.coordinator.commands import fetch_status
from verl_mux.errors import UserError
from verl_mux.places.place import Place

NODES = {"rollout": ["r0"], "train": ["t0"]}


def queue(coordinator, node="r0"):
    pools = coordinator.snapshot()["pools"].values()
    return next(pool["nodes"][node]["queue"] for pool in pools if node in pool["nodes"])


def test_two_jobs_take_turns_and_never_meet_on_a_node(serve, join, pool):
    coordinator = serve()
    inside, met, order = [], [], []

    def run(mux):
        for step in range(1, 26):
            for phase in ("rollout", "train"):
                with mux.phase(phase, step=step) as lease:
                    inside.append(phase)
                    met.append(inside.count(phase) > 1)
                    order.append(lease.token)
                    inside.remove(phase)

    list(pool.map(run, [join(coordinator, "a"), join(coordinator, "b")]))
    assert not any(met)
    assert sorted(order) == list(range(1, 101))


def test_a_lease_says_what_it_is_for_and_how_long_it_took(serve, join, pool, eventually):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    first = a.acquire("rollout", step=3)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: any(request["waited_s"] > first.waited_s for request in queue(coordinator)))
    a.release(first)
    second = waiting.result(60)
    assert (first.token, first.nodes, first.phase, first.step) == (1, ["r0"], "rollout", 3)
    assert second.token == 2
    assert second.waited_s > first.waited_s
    assert second.granted_at > first.granted_at


def test_init_takes_all_nodes_of_the_job_by_default(serve, join):
    lease = join(serve(), "a", {"rollout": ["rollout"], "train": ["t0"]}).acquire("init")
    assert lease.nodes == ["r0", "r1", "t0"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_phase_gives_its_lease_back_on_every_way_out(serve, join, error):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    with pytest.raises(error), a.phase("rollout", step=1):
        raise error
    assert b.acquire("rollout", step=1).token == 2


def test_releasing_twice_does_nothing_the_second_time(serve, join):
    a = join(serve(), "a")
    lease = a.acquire("rollout", step=1)
    a.release(lease)
    a.release(lease)
    assert a.acquire("rollout", step=2).token == 2


@pytest.fixture
def interruptible():
    """Libraries that other tests import put their own handler in the place of Python's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_wait_leaves_the_queue(serve, join, pool, eventually, interruptible):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)

    def interrupt():
        eventually(lambda: queue(coordinator))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = pool.submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        b.acquire("rollout", step=1)
    interrupting.result(60)
    eventually(lambda: not queue(coordinator))
    a.release(lease)
    assert a.acquire("rollout", step=2).token == 2


def test_an_interrupted_request_that_was_granted_meanwhile_is_given_back(serve, join, monkeypatch):
    a = join(serve(), "a")

    def interrupt(mux):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(a), "wait_until_usable", interrupt)  # the first line after the grant that may take long
        a.acquire("rollout", step=1)
    assert a.acquire("rollout", step=1).token == 2


def test_a_holder_sees_that_another_job_waits_for_its_nodes(serve, join, pool, eventually):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    assert not a.contended("rollout")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: a.contended("rollout"))
    assert not a.contended("train")
    a.release(lease)
    waiting.result(60)
    eventually(lambda: not a.contended("rollout"))


def test_a_node_may_go_back_before_the_others(serve, join, pool, eventually):
    coordinator = serve()
    a, b = join(coordinator, "a", {"rollout": ["r0", "r1"], "train": ["t0"]}), join(coordinator, "b", {"rollout": ["r1"]})
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: a.contended("rollout") == ["r1"])
    smaller = a.shrink(lease, ["r1"])
    assert (smaller.token, smaller.nodes) == (lease.token, ["r0"])
    assert waiting.result(60).nodes == ["r1"]
    with pytest.raises(ValueError, match="would keep no node"):
        a.shrink(smaller, ["r0"])
    a.release(smaller)


def test_what_jobs_report_shows_in_the_status(serve, join, eventually):
    coordinator = serve()
    a = join(coordinator, "a", steps=9)
    with a.phase("rollout", step=2):
        a.progress(3, 8)
        a.progress(8, 8)
        a.note("wake")
        a.memory("r0", {"weights": 100, "kv_cache": 50})
        a.memory("r0", {"kv_cache": 0})
        a.report_step(1, {"reward": 0.25}, 12)
        eventually(lambda: coordinator.snapshot()["jobs"]["a"]["metrics"])
        seen = fetch_status(coordinator.address, 60)
        job, node = seen["jobs"]["a"], seen["pools"]["rollout"]["nodes"]["r0"]
        assert (job["state"], job["step"], job["steps"], job["steps_done"]) == ("live", 2, 12, 1)
        assert (job["progress"], job["metrics"], job["note"]) == ([8, 8], {"reward": 0.25}, "wake")
        assert (node["memory"], node["peak_bytes"]) == ({"a": {"weights": 100}}, 150)
        assert [(held["job"], held["phase"], held["step"]) for held in node["holders"]] == [("a", "rollout", 2)]


def test_the_event_log_tells_waits_holds_and_jobs(serve, join, event_log):
    coordinator = serve()
    a = join(coordinator, "a", seed=4)
    with a.phase("train", step=7):
        pass
    a.close()
    name, duration, extra, step = event_log.of("lease_held")[0]
    assert (duration > 0, extra, step) == (True, {"job": "a", "phase": "train", "nodes": ["t0"], "token": 1}, 7)
    assert event_log.of("lease_wait")[0][2] == extra
    assert event_log.of("job_registered")[0][2]["seed"] == 4
    assert event_log.of("job_exited")[0][2] == {"job": "a", "reason": "finished"}


def test_places_come_from_the_configuration(serve, join):
    bound = {"name": "r0", "host": "gpu-07", "gpu_ids": [2, 3], "gpus": 2, "cpus": [0]}
    a = join(serve(pools={"rollout": {"nodes": [bound, {"name": "r1"}]}}), "a", {"rollout": ["rollout"]})
    places = [a.place(node) for node in ("r0", "r1", "elsewhere")]
    assert places == [Place(host="gpu-07", gpu_ids=[2, 3], cpus=[0]), Place(), Place()]


def test_refusals_arrive_as_user_errors(serve, join):
    coordinator = serve()
    a = join(coordinator, "a")
    with pytest.raises(UserError, match="a job named 'a' is running"):
        join(coordinator, "a")
    with pytest.raises(UserError, match="'gpu9', which is no pool or node here; pools and their nodes: rollout"):
        join(coordinator, "b", {"rollout": ["gpu9"]})
    with pytest.raises(UserError, match="asks for 9 GPUs on node 'r0', which has 8"):
        join(coordinator, "b", gpus={"rollout": 9})
    with pytest.raises(UserError, match="phase 'sync' is not known"):
        a.acquire("sync", step=1)
    with pytest.raises(UserError, match="which it holds under token 1"), a.phase("rollout", step=1):
        a.acquire("rollout", step=1)


def test_without_a_coordinator_the_error_names_the_address_and_the_wait():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"no coordinator answers at {address} \(waited 0.2 s\)"):
            connect(address, "a", NODES, timeout=0.2, uid="a:1")


def test_an_address_that_is_none_is_refused():
    with pytest.raises(UserError, match="coordinator address 'localhost' is not usable"):
        connect("localhost", "a", NODES, uid="a:1")


def take_away(coordinator, token):
    """Ends a lease behind its holder's back."""
    coordinator._call(lambda: coordinator._machine.state.leases.pop(token))


def test_a_lease_that_is_gone_raises_lease_lost(serve, join, eventually):
    coordinator = serve()
    a = join(coordinator, "a")
    lease = a.acquire("rollout", step=1)
    take_away(coordinator, lease.token)
    eventually(lambda: a._talk.lost)  # the next heartbeat finds out
    with pytest.raises(LeaseLost, match="token 1 is stale"):
        a.release(lease)
    with pytest.raises(LeaseLost), a.phase("rollout", step=2) as lease:
        take_away(coordinator, lease.token)
        eventually(lambda: a._talk.lost)
        a.progress(1, 2)


def test_a_job_that_is_given_up_loses_its_leases_and_can_ask_for_none(serve, join, say_over, eventually):
    coordinator = serve(kill=False)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    say_over(coordinator, "b", b.uid)
    with pytest.raises(LeaseLost, match="said to have exited by what started it"):
        b.acquire("rollout", step=1)
    say_over(coordinator, "a", a.uid)
    eventually(lambda: a._talk.ended)
    with pytest.raises(LeaseLost, match="job 'a' has no leases any more"):
        a.release(lease)
    with pytest.raises(LeaseLost):
        a.progress(1, 2)


def test_a_waiting_call_is_woken_when_the_job_is_given_up(serve, join, pool, say_over, eventually):
    coordinator = serve(kill=False)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: queue(coordinator))
    say_over(coordinator, "b", b.uid)
    with pytest.raises(LeaseLost):
        waiting.result(60)


def test_closing_gives_everything_back_and_a_second_time_does_nothing(serve, join):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    a.close()
    a.close()
    assert b.acquire("rollout", step=1).token == 2
    with pytest.raises(LeaseLost, match="closed|finished"):
        a.acquire("rollout", step=2)
    a.release(lease)


def test_a_second_client_with_the_jobs_uid_joins_the_job(serve, join, eventually):
    coordinator = serve()
    driver, actor = join(coordinator, "a", uid="a:x"), join(coordinator, "a", uid="a:x")
    actor.note("from the actor")
    actor.close()
    eventually(lambda: coordinator.snapshot()["jobs"]["a"]["note"] == "from the actor")
    assert driver.acquire("rollout", step=1).token == 1
    driver.close()
    assert coordinator.snapshot()["jobs"]["a"]["state"] == "ended"


def test_a_job_may_look_in_leave_and_come_again_under_the_same_uid(serve, join):
    coordinator = serve(expect_jobs=1)
    join(coordinator, "a", uid="a:x").close()
    again = join(coordinator, "a", uid="a:x")
    with again.phase("init"):
        assert not coordinator.snapshot()["started"]
    assert again.acquire("rollout", step=1).step == 1


@pytest.fixture
def default(monkeypatch):
    """No default client and no environment, before and after."""
    monkeypatch.setattr(client_module, "_default", None)
    for name in ("VERL_MUX_COORDINATOR", "VERL_MUX_JOB", "VERL_MUX_NODES", "VERL_MUX_JOB_UID"):
        monkeypatch.setenv(name, "")  # so that what `connect` puts there is taken away again
        monkeypatch.delenv(name)
    return monkeypatch


def test_without_a_coordinator_every_lease_is_granted_at_once():
    mux = connect(None, "a", NODES)
    assert type(mux) is LocalMux
    with mux.phase("init") as init, mux.phase("rollout", step=4) as rollout, mux.phase("rollout") as counted:
        assert (init.nodes, rollout.nodes, counted.step) == (["r0", "t0"], ["r0"], 5)
        assert [init.token, rollout.token, counted.token] == [1, 2, 3]
    assert isinstance(init, Lease)
    mux.release(init)
    for call in (mux.progress(1, 2), mux.report_step(1, {}), mux.memory("r0", {}), mux.note(""), mux.members([])):
        assert call is None
    assert (mux.contended("rollout"), mux.place("r0"), mux.address) == ([], Place(), None)
    with pytest.raises(UserError, match="phase 'generate' is not known; allowed: init, rollout, train"):
        mux.acquire("generate")


def test_the_modules_phase_is_local_when_nothing_is_configured(default):
    with verl_mux.phase("rollout") as lease:
        assert lease.token == 1
    assert client_module.default_mux().address is None


def test_the_modules_phase_takes_its_coordinator_from_the_environment(default, serve):
    coordinator = serve()
    default.setenv("VERL_MUX_COORDINATOR", coordinator.address)
    default.setenv("VERL_MUX_JOB", "env-job")
    default.setenv("VERL_MUX_NODES", '{"train": ["t0"]}')

    @verl_mux.phase("train")
    def update(x):
        holder = coordinator.snapshot()["pools"]["train"]["nodes"]["t0"]["holders"][0]
        return x, holder["job"], holder["step"]

    assert [update(1), update(2)] == [(1, "env-job", 1), (2, "env-job", 2)]
    client_module.default_mux().close()


def test_bad_nodes_in_the_environment_are_refused(default):
    default.setenv("VERL_MUX_NODES", "r0")
    with pytest.raises(UserError, match="VERL_MUX_NODES is 'r0'; expected JSON like"), verl_mux.phase("train"):
        pass


def test_an_async_function_holds_its_lease_until_it_is_done(default, serve):
    coordinator = serve()
    default.setenv("VERL_MUX_COORDINATOR", coordinator.address)
    default.setenv("VERL_MUX_JOB", "a")
    default.setenv("VERL_MUX_NODES", json.dumps(NODES))

    @verl_mux.phase("rollout")
    async def generate():
        await asyncio.sleep(0)
        return coordinator.snapshot()["jobs"]["a"]["tokens"]

    @verl_mux.phase("rollout")
    async def fail():
        raise ValueError("inside")

    assert asyncio.run(generate()) == [1]
    with pytest.raises(ValueError, match="inside"):
        asyncio.run(fail())
    assert coordinator.snapshot()["jobs"]["a"]["tokens"] == []
    client_module.default_mux().close()


def test_a_job_that_hears_nothing_stops_before_its_lease_is_over_and_goes_on_when_it_is_heard(serve, join, eventually, tmp_path):
    coordinator = serve(tmp_path / "journal", lease_timeout=2)
    a = join(coordinator, "a")
    stopped = threading.Event()
    a.guard(stopped.set)
    lease = a.acquire("rollout", step=1)
    a.wait_until_usable()
    assert not stopped.is_set()
    coordinator.stop()
    assert stopped.wait(60)
    serve(tmp_path / "journal", bind=coordinator.address, lease_timeout=2)
    a.wait_until_usable()
    a.release(lease)


def test_a_job_that_is_ended_while_it_waits_raises(serve, join, pool, say_over, tmp_path):
    coordinator = serve(tmp_path / "journal", kill=False, lease_timeout=2)
    a = join(coordinator, "a")
    stopped = threading.Event()
    a.guard(stopped.set)
    a.acquire("rollout", step=1)
    coordinator.stop()
    assert stopped.wait(60)
    waiting = pool.submit(a.wait_until_usable)
    say_over(serve(tmp_path / "journal", bind=coordinator.address, kill=False, lease_timeout=2), "a", a.uid)
    with pytest.raises(LeaseLost):
        waiting.result(60)  # returns where the coordinator's first answer came before it was noted of the end
        a.wait_until_usable()
        a.acquire("train", step=1)


TRAIN = {"train": ["train"]}


def test_a_training_loop_runs_between_the_phases_of_a_job(serve, join, event_log, eventually):
    coordinator = serve()
    job, filler = join(coordinator, "job"), join(coordinator, "sums", TRAIN, filler=True)
    with filler.phase("train") as lease:
        assert (lease.nodes, lease.step, lease.wanted.is_set()) == (["t0"], 0, False)
        asking = threading.Thread(target=lambda: job.release(job.acquire("train", step=1)))
        asking.start()
        assert lease.wanted.wait(60)
    asking.join(60)
    with filler.phase("train") as again:
        assert again.token > lease.token and not again.wanted.is_set()
    left = [extra["leaving_s"] for _, _, extra, _ in event_log.of("lease_held") if extra.get("filler")]
    assert left[0] >= 0 and left[1] is None


def test_a_lease_may_be_asked_for_with_a_number_of_nodes(serve, join):
    filler = join(serve(), "batch", {"rollout": ["rollout"]}, filler=True)
    with filler.phase("rollout", num_nodes=2) as lease:
        assert sorted(lease.nodes) == ["r0", "r1"]
    with pytest.raises(UserError, match="any 3 of 2 nodes"), filler.phase("rollout", num_nodes=3):
        pass


def test_a_lease_that_is_gone_is_wanted_too(serve, join):
    """A job that looks at `wanted` only must not go on for ever when the coordinator is gone: the lease may not be used then."""
    coordinator = serve(lease_timeout=2)
    filler = join(coordinator, "sums", TRAIN, filler=True, timeout=1.0)
    lease = filler.acquire("train")
    coordinator.stop()
    assert lease.wanted.wait(60)


def test_without_a_coordinator_a_filler_gets_what_it_asks_for():
    filler = connect(None, "sums", {"train": ["t0", "t1"]}, filler=True)
    with filler.phase("train") as lease:
        assert lease.nodes == ["t0"] and lease.step == 0 and not lease.wanted.is_set()
