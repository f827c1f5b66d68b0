"""Jobs' clients, alone and through a coordinator."""

import signal
import socket
import threading

import pytest

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


def test_a_holder_sees_that_another_job_waits_and_may_give_a_node_back_before_the_others(serve, join, pool):
    coordinator = serve()
    a, b = join(coordinator, "a", {"rollout": ["r0", "r1"], "train": ["t0"]}), join(coordinator, "b", {"rollout": ["r1"]})
    lease = a.acquire("rollout", step=1)
    assert not lease.wanted.is_set()
    waiting = pool.submit(b.acquire, "rollout", step=1)
    assert lease.wanted.wait(60)
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


def test_refusals_arrive_as_user_errors(serve, join):
    coordinator = serve()
    a = join(coordinator, "a")
    with pytest.raises(UserError, match="a job named 'a' is running"):
        join(coordinator, "a")
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


def test_a_job_that_is_given_up_loses_its_leases_and_its_waiting_call_is_woken(serve, join, pool, say_over, eventually):
    coordinator = serve(kill=False)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: queue(coordinator))
    say_over(coordinator, "b", b.uid)
    with pytest.raises(LeaseLost, match="said to have exited by what started it"):
        waiting.result(60)
    say_over(coordinator, "a", a.uid)
    eventually(lambda: a._talk.ended)
    with pytest.raises(LeaseLost, match="job 'a' has no leases any more"):
        a.release(lease)
    with pytest.raises(LeaseLost):
        a.progress(1, 2)


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


def test_without_a_coordinator_every_lease_is_granted_at_once():
    mux = connect(None, "a", NODES)
    assert type(mux) is LocalMux
    with mux.phase("init") as init, mux.phase("rollout", step=4) as rollout:
        assert (init.nodes, rollout.nodes, rollout.step, init.token, rollout.token) == (["r0", "t0"], ["r0"], 4, 1, 2)
    assert isinstance(init, Lease)
    mux.release(init)
    for call in (mux.progress(1, 2), mux.report_step(1, {}), mux.memory("r0", {}), mux.note(""), mux.members([])):
        assert call is None
    assert (mux.place("r0"), mux.address) == (Place(), None)
    with pytest.raises(UserError, match="phase 'generate' is not known; allowed: init, rollout, train"):
        mux.acquire("generate")


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
