"""Several pairs of pools: where a job goes, and what one pair knows of another; why a job is where it is."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from tests.placement.made_jobs import CHEAP, DEAR, EITHER, Planner, assert_invariants, jobs, make_cluster, make_job
from verl_mux.errors import UserError
from verl_mux.placement.explain import lost_to
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import LIVE, Cluster, Estimate, JobSpec, NodeKind, Pool, Rules
from verl_mux.placement.planner import Arrive, Record, alternatives, by_price, pair_of

SLOW = NodeKind(name="slow", usd_per_gpu_hour=0.5, host_memory_gb=1000)


def clusters(old: int = 2, new: int = 2, train: int = 2) -> dict[str, Cluster]:
    """Two rollout pools beside one training pool."""

    def pool(name: str, kind: NodeKind, count: int) -> Pool:
        return Pool(name=name, kind=kind, nodes=tuple(f"{name}-{i}" for i in range(count)))

    trains = pool("train", DEAR, train)
    return {f"{name}+train": Cluster(rollout=pool(name, kind, count), train=trains)
            for name, kind, count in (("new", CHEAP, new), ("old", SLOW, old))}  # fmt: skip


def on_both(job: JobSpec, longer: float = 1.0) -> dict[str, JobSpec]:
    """longer: how many times as long a rollout takes on the old ones."""
    rollout = Estimate(seconds=job.rollout.seconds * longer)
    return {"new+train": job, "old+train": msgspec.structs.replace(job, rollout=rollout)}


MOST = 8
NO_JOBS = Record()


def pairs(record: Record = NO_JOBS, closed: frozenset[str] = frozenset(), **counts: int) -> Planner:
    return Planner(clusters(**counts), LIVE, record, closed)


def record_of(its: Planner) -> Record:
    return Record(groups=tuple(its.groups.values()), waiting=tuple(its.waiting), named=its.books.named)


def admit(its: Planner, specs: dict[str, JobSpec], progress: dict[str, Progress] | None = None):
    """The pair it is looked at in first or was placed in, and the decision."""
    (first, job), *others = specs.items()
    decision = its.answer(Arrive(job, first, dict(others)), progress or {}, explained=MOST).decision
    return its.home(job.name), decision


def ways(its: Planner, specs: dict[str, JobSpec]):
    return {pair: alternatives(its.placer_of(pair), spec, MOST) for pair, spec in specs.items()}


# Of an hour of a training node for 42.24 USD and of a rollout node for 14.80 or 4.00, by the seconds of an iteration.
@pytest.mark.parametrize(("longer", "where"), [(1.0, "old+train"), (1.2, "old+train"), (1.5, "new+train"), (3.0, "new+train")])
def test_a_job_goes_where_its_work_costs_the_least(longer, where):
    specs = on_both(make_job("a", 100, 100), longer)
    usd = by_price(specs, ways(pairs(), specs))
    assert usd == pytest.approx({"new+train": 57.04, "old+train": 46.24 * (100 * longer + 100) / 200})
    pair, decision = admit(pairs(), specs)
    assert pair == where and decision.rollout == (f"{where.split('+')[0]}-0",) and decision.train == ("train-0",)


def test_what_one_pair_holds_is_closed_to_the_other():
    its = pairs(train=1)
    assert admit(its, {"old+train": make_job("a", 100, 100, slo=1.0)})[0] == "old+train"
    pair, decision = admit(its, {"new+train": make_job("b", 100, 100, slo=1.0)})
    assert decision.outcome == "queued" and its.waits("b")
    (move,) = its.depart("a", {}, 0.0)
    assert (move.job, move.kind, move.rollout, move.train) == ("b", "start", ("new-0",), ("train-0",))
    assert its.home("b") == "new+train" and not its.waiting


def test_names_are_unique_over_all_pairs():
    its = pairs(train=1)
    for name, pair, other in (("a", "old+train", "new+train"), ("b", "new+train", "old+train")):  # b waits
        admit(its, {pair: make_job(name, 100, 100, slo=1.0)})
        with pytest.raises(UserError, match=f"job '{name}' is placed or waiting already"):
            admit(its, {other: make_job(name, 100, 100, slo=1.0)})


def test_who_waits_starts_in_whichever_pair_has_room_first_as_it_is_there():
    its = pairs(old=1, new=1, train=2)
    tight = {"slo": 1.0}
    assert [admit(its, {pair: make_job(name, 100, 100, **tight)})[0] for name, pair in (("a", "new+train"), ("b", "old+train"))]
    admit(its, on_both(make_job("c", 50, 50, **tight), 2.0))
    (entry,) = its.waiting
    assert (entry.job.name, entry.pair, list(entry.elsewhere)) == ("c", "", ["old+train"])
    (move,) = its.depart("b", {}, 0.0)
    assert move.rollout == ("old-0",) and its.groups[move.group].jobs[0].rollout.seconds == 100


@pytest.mark.parametrize(("longer", "where"), [(1.0, "old-0"), (3.0, "new-0")])
def test_where_several_pairs_have_room_by_then_it_starts_where_its_work_costs_the_least(longer, where):
    its = pairs(train=1)
    admit(its, {"new+train": make_job("a", 100, 100, slo=1.0)})
    admit(its, on_both(make_job("b", 50, 50, slo=1.0), longer))
    (move,) = its.depart("a", {}, 0.0)
    assert move.rollout == (where,) and not its.waiting


def test_where_the_one_that_nobody_may_pass_leaves_the_others_start():
    its = pairs(train=2)
    admit(its, {"new+train": make_job("a", 100, 100, slo=1.0)})
    admit(its, {"old+train": make_job("wide", 100, 100, train_nodes=2, slo=1.0)})
    its.waiting = [msgspec.structs.replace(entry, passed=LIVE.max_bypass) for entry in its.waiting]
    assert admit(its, {"old+train": make_job("b", 100, 100, slo=1.0)})[1].outcome == "queued"
    (move,) = its.depart("wide", {}, 0.0)
    assert (move.job, move.rollout) == ("b", ("old-0",))


@pytest.mark.parametrize("which", [["new+train"], ["new+train", "old+train"]])
def test_who_waits_starts_before_anybody_is_moved_into_its_room(which):
    found = clusters(old=1, new=2, train=3)
    its = Planner({pair: found[pair] for pair in which}, LIVE, NO_JOBS, frozenset())
    for at, slo in enumerate((2.0, 2.0, 1.0, 1.5)):
        admit(its, {"new+train": make_job(f"j{at}", 100, 50, slo=slo, cold_start_s=40)})
    assert [entry.job.name for entry in its.waiting] == ["j2"]
    old = {job.name: Progress(age_s=1e7, done=10**5, solo_s=1e7) for group in its.groups.values() for job in group.jobs}
    assert [(move.kind, move.job) for move in its.depart("j0", old, 0.0)] == [("start", "j2")]


def test_younger_jobs_of_another_pair_pass_no_oftener_where_they_take_nodes_of_the_same_pool():
    its = pairs(old=2, new=1, train=2)
    for name in ("s0", "s1"):
        admit(its, {"old+train": make_job(name, 100, 100, slo=1.0)})
    admit(its, {"new+train": make_job("wide", 100, 100, train_nodes=2, slo=1.0)})
    for at in range(2, 40):
        admit(its, {"old+train": make_job(f"s{at}", 100, 100, slo=1.0)})
        its.depart(f"s{at - 2}", {}, 0.0)
    assert its.home("wide") == "new+train" or max(at for at in range(40) if its.home(f"s{at}")) <= LIVE.max_bypass + 2


def test_of_groups_whose_nodes_have_left_their_pool_the_pair_is_still_found():
    found = clusters()
    assert pair_of(["old-0"], ["train-0"], found) == "old+train" and pair_of([], ["train-1"], found) == "new+train"
    assert pair_of(["gone", "old-1"], ["train-9"], found) == "old+train" and pair_of(["gone"], [], found) == "new+train"


@settings(max_examples=examples(30))
@given(
    given_jobs=jobs(most=8),
    longer=st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=8, max_size=8),
    only=st.lists(st.sampled_from((None, None, "new+train", "old+train")), min_size=8, max_size=8),
    closed=st.sets(st.sampled_from(("old-0", "new-1", "train-0"))),
    leaving=st.permutations(range(8)),
    kept=st.booleans(),
)
def test_in_all_pairs_together_every_promise_holds(given_jobs, longer, only, closed, leaving, kept):
    """kept: the same placers all along, or made anew from the record each time."""
    its = pairs(closed=frozenset(closed), old=3, new=3, train=3)

    def after() -> Planner:
        held = [node for group in its.groups.values() for node in (*group.rollout_nodes, *group.train_nodes)]
        assert len(held) == len(set(held)) and closed.isdisjoint(held)
        names = [group.name for group in its.groups.values()]
        assert len(names) == len(set(names))
        for pair in its.clusters:
            assert_invariants(its.placer_of(pair))
        there = [job.name for group in its.groups.values() for job in group.jobs] + [entry.job.name for entry in its.waiting]
        assert sorted(there) == sorted(alive)
        return its if kept else pairs(record_of(its), frozenset(closed), old=3, new=3, train=3)

    def old() -> dict[str, Progress]:
        placed = [job for group in its.groups.values() for job in group.jobs]
        return {job.name: Progress(age_s=100 * job.iteration_s, done=100, phase="rollout") for job in placed}

    alive: list[str] = []
    for job, times, only_in in zip(given_jobs, longer, only, strict=False):
        specs = {pair: spec for pair, spec in on_both(job, times).items() if only_in in (None, pair)}
        _, decision = admit(its, specs, old())
        alive.append(job.name)
        assert decision.outcome == ("queued" if its.waits(job.name) else "placed")
        its = after()
    for index in leaving:
        if index < len(given_jobs):
            its.depart(given_jobs[index].name, old(), 0.0)
            alive.remove(given_jobs[index].name)
            its = after()
    assert not its.groups and not its.waiting


def reasons(placer, job) -> list[str]:
    return [alternative.why for alternative in alternatives(placer.placer, job)]


def test_each_kind_of_refusal_has_its_words():
    placer = Planner.of_one(make_cluster(2, 2), Rules(cap=2, rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("a", 100, 100, slo=1.2, rollout_memory_gb=700))
    assert "900 GB" in reasons(placer, make_job("m", 100, 100, slo=1.2, rollout_memory_gb=900))[0]
    assert "busy for at least" in reasons(placer, make_job("s", 300, 30, slo=1.0))[0]
    placer.admit(make_job("b", 100, 100, slo=1.2, rollout_memory_gb=10))
    found = reasons(placer, make_job("c", 10, 10, rollout_nodes=2, train_nodes=2))
    assert found == ["full: 2 jobs, the cap", "needs 2 + 2 nodes; free are 1 + 1"]


def test_a_place_that_would_break_an_slo_names_whose():
    placer = Planner.of_one(make_cluster(), Rules(rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("long", 200, 200, slo=1.0))
    why = reasons(placer, make_job("short", 30, 30, slo=1.5))[0]
    assert why.startswith("short would take") and "its SLO allows 90 s" in why


def test_what_could_have_been_taken_lost_by_its_price():
    placer = Planner.of_one(make_cluster())
    placer.admit(make_job("a", 100, 100, slo=1.3))
    found = alternatives(placer.placer, make_job("b", 100, 100, slo=1.3))
    assert [alternative.why for alternative in found] == ["", ""]
    assert lost_to(placer.admit(make_job("b", 100, 100, slo=1.3)), found)[-1].why == "costs 57.04 USD/h more"


def test_nodes_of_its_own_are_told_for_each_mode():
    placer = Planner.of_one(make_cluster(1, 2))
    placer.admit(make_job("a", 100, 100, slo=1.0))
    found = alternatives(placer.placer, make_job("b", 100, 100, slo=1.0, modes=EITHER))
    assert [(place.strategy, place.why) for place in found[1:]] == [
        ("isolated", "needs 1 + 1 nodes; free are 0 + 1"),
        ("colocated", ""),
    ]


def sentence(placer, job):
    return placer.answer(Arrive(job), {}, explained=None).because


def test_a_job_alone_says_why_and_one_that_waits_too():
    placer = Planner.of_one(make_cluster(), Rules(rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("a", 100, 100, slo=2.0))
    assert sentence(placer, make_job("b", 300, 30, slo=1.0)) == (
        "which added 57.04 USD/h, as group g1 could not take it: every rollout node is busy for at least 25% of the time and the"
        " job needs 91%, and no allowed way to share its train nodes"
    )
    placer = Planner.of_one(make_cluster(1, 1))
    placer.admit(make_job("a", 100, 100, slo=1.2))
    assert sentence(placer, make_job("b", 300, 300, slo=1.0)) == "no room within everybody's SLO"
