"""Where jobs go that could go to several pairs of pools, on the state machine driven by hand."""

import msgspec
import pytest

from tests.coordinator.core.placement.placed_jobs import CPU, arrive, lines, needs, where_told
from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core import snapshot
from verl_mux.coordinator.core.records import JobEvicted, ProcessesGone, State
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.journal import Journal
from verl_mux.placement.estimator import GPU_KINDS, GpuKind, Observed

# In all four times as slow.
OLD = {**CPU, "tflops": CPU["tflops"] / 4, "tb_per_s": CPU["tb_per_s"] / 4}
GPU_KINDS["old"] = GpuKind(**OLD)


def several(count=1, old_usd=0.1, **keys):
    def pool(letter, kind, usd, count=count):
        return {
            "kind": kind,
            "nodes": [{"name": f"{letter}{i}", "usd_per_hour": usd, "host_bytes": 10**10} for i in range(count)],
        }

    pools = {"new": pool("r", "cpu", 1.0), "old": pool("o", "old", old_usd), "train": pool("t", "cpu", 1.0)}
    placement = {"rollout": ["new", "old"], "train": "train", "observe": 2}
    return make_config({"pools": pools, "placement": placement, **keys})


@pytest.fixture
def driver():
    return Driver(Machine(several(count=2)))


def seen(rollout, train):
    return Observed(rollout=(rollout,) * 3, train=(train,) * 3)


@pytest.mark.parametrize(
    ("rollout_s", "old_usd", "where"), [(10.0, 0.5, "o0"), (90.0, 0.5, "r0"), (90.0, 0.0, "r0"), (20.0, 0.0, "o0")]
)
def test_a_job_goes_to_the_pools_where_its_work_costs_the_least(rollout_s, old_usd, where):
    """100 s with a rollout of 10 are 130 s on the old ones, for 1.5 USD/h in place of 2; with one of 90 they are 370."""
    driver = Driver(Machine(several(old_usd=old_usd)))
    profiled = seen(rollout_s, 100 - rollout_s)
    assert where_told(arrive(driver, "a", slo=5.0, profiled=profiled)) == [{"rollout": [where], "train": ["t0"]}]
    (placed,) = lines(driver, "placed")
    there = rollout_s * (1 if where == "r0" else 4)
    assert placed["estimated"]["rollout_s"] == pytest.approx(there)
    assert placed["usd_per_hour"] == pytest.approx(2.0 if where == "r0" else 1 + old_usd)
    (group,) = describe(driver.machine.state, driver.machine.config, driver.now, {})["placement"]["groups"].values()
    assert group["usd_per_hour"] == placed["usd_per_hour"] and group["limits"] == {"a": pytest.approx(500.0)}


def test_what_the_others_would_have_cost_is_told(driver):
    arrive(driver, "a", slo=5.0, profiled=seen(10.0, 90.0))
    (placed,) = lines(driver, "placed")
    others = [place for place in placed["alternatives"] if place["why"].startswith("on new+train")]
    assert [place["why"] for place in others] == ["on new+train: as much work costs 2.00 USD/h there"]
    (noted,) = snapshot.reasons(driver.machine.state, driver.machine.config).values()
    assert noted.endswith("; on new+train as much work would have cost 2.00 USD/h")


def test_a_job_that_fits_in_no_pool_is_told_why_of_the_first(driver):
    (refused,) = arrive(driver, "a", needs=needs(rollout_gpus=2))
    assert refused.reason == "job 'a' asks for 2 GPUs on each rollout node; those of pool 'new' have 1"


def test_a_colocated_job_has_the_training_pool_alone(driver):
    assert where_told(arrive(driver, "a", colocated=True)) == [{"rollout": ["t0"], "train": ["t0"]}]
    (placed,) = lines(driver, "placed")
    assert not [place for place in placed["alternatives"] if place["why"].startswith("on ")], "all pairs are one to it"


def test_a_node_that_is_taken_away_moves_its_job_within_the_pair(driver):
    arrive(driver, "a", slo=5.0, profiled=seen(10.0, 90.0), movable=True)
    assert driver.machine.state.jobs["a"].nodes["rollout"] == ["o0"]
    driver.reload(drain=["o0"])
    assert driver.machine.state.placed.group_of("a").rollout_nodes == ("o1",)


def test_a_node_that_is_gone_leaves_its_pair_usable(driver):
    arrive(driver, "a", slo=5.0, profiled=seen(10.0, 90.0))
    driver.do(JobEvicted(job="a", uid="a:1", reason="its host is gone"))
    driver.do(ProcessesGone(job="a", uid="a:1"))
    driver.reload(drain=["o0"])
    driver.reload(remove=["o0"])
    assert where_told(arrive(driver, "b", slo=5.0, profiled=seen(10.0, 90.0))) == [{"rollout": ["o1"], "train": ["t0"]}]


def test_a_coordinator_that_lost_its_memory_finds_jobs_in_whichever_pools_they_say_they_are(driver):
    for job, rollout, train in (("a", "o1", "t1"), ("b", "r0", "t0")):
        where = {"rollout": [rollout], "train": [train]}
        assert arrive(driver, job, again=True, placed=where, slo=5.0, profiled=seen(10.0, 90.0))[0].nodes == where
    spec = driver.machine.state.placed.job("a")
    assert spec.rollout.seconds == 40.0 and driver.machine.state.placed.job("b").rollout.seconds == 10.0
    (refused,) = arrive(driver, "c", again=True, placed={"rollout": ["o0", "r1"], "train": ["t1"]})
    assert refused.reason.startswith("job 'c' says it was placed on ['o0', 'r1'] for rollout; allowed: 1 of ")


def test_the_records_survive_the_journal_and_it_decides_as_before(tmp_path):
    config = several(count=2)
    journal = Journal(tmp_path / "journal")
    machine = journal.restore(config, "first", is_first=True)
    driver = Driver(machine)
    for job in ("a", "b", "c"):
        arrive(driver, job, slo=1.0, profiled=seen(10.0, 90.0))
    assert [entry.elsewhere for entry in machine.state.placed.waiting] == [{}], "its SLO leaves it one pair"
    arrive(driver, "d", slo=5.0, profiled=seen(10.0, 90.0), needs=needs(train_nodes=2))
    (_, waits) = machine.state.placed.waiting
    assert list(waits.elsewhere) == ["old+train"] and waits.elsewhere["old+train"].limit_s == pytest.approx(waits.job.limit_s)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(machine.state), type=State) == machine.state
    for event in driver.events:
        journal.append(event)
    journal.close()
    restored = Journal(tmp_path / "journal").restore(config, "second", is_first=True)
    again = Driver(restored)
    again.now = driver.now
    for each in (driver, again):
        each.do(m.Deregister(**each.who("a")))
        each.do(m.Deregister(**each.who("b")))
    assert restored.state.placed == machine.state.placed
