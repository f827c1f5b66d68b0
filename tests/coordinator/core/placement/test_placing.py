"""Jobs that leave their nodes to the coordinator, on the state machine driven by hand and on real sockets."""

import concurrent.futures

import msgspec
import pytest

from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.inputs_and_instructions import Input, NodeDrained, Send
from verl_mux.coordinator.core.placement import placing
from verl_mux.coordinator.core.placement.planner import Asked, Planner
from verl_mux.coordinator.core.records import State
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.journal.before import Before
from verl_mux.coordinator.journal.journal import Journal
from verl_mux.coordinator.status_view import plain
from verl_mux.errors import UserError
from verl_mux.scheduling.estimate.estimator import Observed
from verl_mux.scheduling.estimate.job_needs import JobNeeds, model_size
from verl_mux.scheduling.placer.record import Arrive, Record

MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000, "num_attention_heads": 4}
AUTO = {"rollout": [m.AUTO], "train": [m.AUTO]}
# One token a second: a rollout of at most 100 s and a training phase of about as long.
CPU = {"tflops": 1e-3, "tb_per_s": 1e-6, "decode": 1.0, "train": 0.5, "fixed_s": 0.0, "process_gb": 4.0}


def pools(count=1):
    node = {"usd_per_hour": 1.0, "host_bytes": 10**10}
    sides = ("rollout", "train")
    return {side: {"kind": "cpu", "nodes": [{"name": f"{side[0]}{i}", **node} for i in range(count)]} for side in sides}


def placing_config(count=1, **keys):
    return make_config({"pools": pools(count), "placement": {"kinds": {"cpu": CPU}, "observe": 2, **keys}})


def needs(**changes):
    given = {"responses": 8, "prompt_tokens": 16, "response_tokens": 100, "rollout_nodes": 1, "rollout_gpus": 1}
    return JobNeeds(**{**given, "train_nodes": 1, "train_gpus": 1, "weight_bytes": 4, "model": model_size(MODEL), **changes})


def arrive(driver, job, **keys):
    return driver.register(job, nodes=AUTO, **{"needs": needs(), **keys})


@pytest.fixture
def driver():
    return Driver(Machine(placing_config()))


def step(driver, job, number, rollout=3.0, train=2.0, between=0.0):
    driver.ask(job, "rollout", number, ["r0"])
    driver.now += rollout - 1
    driver.release(job)
    driver.now += between - 1
    driver.ask(job, "train", number, ["t0"])
    driver.now += train - 1
    driver.release(job)


def lines(driver, event):
    return [line.extra for line in driver.logged if line.event == event]


def test_a_job_that_comes_alone_gets_nodes_of_its_own(driver):
    (answer,) = arrive(driver, "a")
    assert isinstance(answer, m.Registered)
    assert answer.nodes == {"rollout": ["r0"], "train": ["t0"]}
    (placed,) = lines(driver, "placed")
    assert placed["outcome"] == "placed" and placed["strategy"] == "isolated" and placed["estimated"]["source"] == "bound"
    (predicted,) = lines(driver, "group_predicted")
    assert predicted["source"] == "estimated" and predicted["usd_per_hour"] == 2.0


def test_the_second_job_shares_nodes_because_that_costs_nothing_more():
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a")
    (answer,) = arrive(driver, "b")
    assert answer.nodes == {"rollout": ["r0"], "train": ["t0"]}
    assert lines(driver, "placed")[-1]["strategy"] == "direct packing"
    placed = lines(driver, "placed")[-1]
    assert placed["usd_per_hour"] == 0.0
    (lost,) = placed["alternatives"]
    assert lost["strategy"] == "isolated" and lost["why"] == "costs 2.00 USD/h more"


def test_a_job_with_a_tight_slo_shares_only_the_node_on_which_it_never_waits():
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a")
    (answer,) = arrive(driver, "b", slo=1.0)
    assert answer.nodes == {"rollout": ["r1"], "train": ["t0"]}
    assert lines(driver, "placed")[-1]["strategy"] == "rollout scaling"


def test_a_job_without_room_waits_and_gets_the_nodes_of_the_one_that_leaves(driver):
    arrive(driver, "a", slo=1.0)
    (answer,) = arrive(driver, "b", slo=1.0)
    assert isinstance(answer, m.Queued) and "waits for nodes" in answer.reason
    (again,) = arrive(driver, "b", slo=1.0)
    assert isinstance(again, m.Queued)
    refused = driver.ask("b", "rollout", 1, ["r0"])
    assert isinstance(refused[0], m.Refused)
    driver.ask("a", "rollout", 1, ["r0"])
    driver.release("a")
    sent = driver.do(m.Deregister(**driver.who("a")))
    assert [message.nodes for message in sent if isinstance(message, m.Registered)] == [{"rollout": ["r0"], "train": ["t0"]}]
    assert isinstance(driver.ask("b", "rollout", 1, ["r0"])[0], m.LeaseGrant)


def test_a_waiting_job_that_goes_leaves_the_queue(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    driver.do(m.Detach(**driver.who("b")))
    assert driver.machine.state.placed.waiting == ()


def test_host_memory_is_a_limit():
    driver = Driver(Machine(placing_config(count=2)))
    for job in ("a", "b", "c"):  # 4 GB each on nodes of 10 GB
        answer = arrive(driver, job)[0]
    assert answer.nodes == {"rollout": ["r1"], "train": ["t1"]}


def held(driver, job, gb, *nodes):
    """After two steps that job was seen to hold so much of these nodes' host memory."""
    driver.do(m.StepReport(**driver.who(job), step=2, metrics={}))
    for node in nodes:
        driver.do(m.HostReport(**driver.who(job), node=node, bytes={"private": round(gb * 1e9)}))


def test_host_memory_that_was_measured_takes_the_place_of_the_estimate():
    driver = Driver(Machine(placing_config()))
    arrive(driver, "a", slo=10.0)
    held(driver, "a", 7, "t0")
    spec = driver.machine.state.placed.job("a")
    assert spec.train_memory_gb == 7.0 and spec.rollout_memory_gb < 5
    (answer,) = arrive(driver, "b", slo=10.0)
    assert isinstance(answer, m.Queued), "4 GB more do not fit beside them"
    less = Driver(Machine(placing_config()))
    for job in "ab":
        arrive(less, job, slo=10.0)
    (answer,) = arrive(less, "c", slo=10.0)
    assert isinstance(answer, m.Queued), "by their estimates the two fill the nodes"
    held(less, "a", 2, "r0", "t0")
    held(less, "b", 2, "r0", "t0")
    started = [step.message.nodes for step in less.sent if step.client == "c-client" and isinstance(step.message, m.Registered)]
    assert started == [{"rollout": ["r0"], "train": ["t0"]}]


def test_phases_are_observed_and_held_against_the_estimate(driver):
    arrive(driver, "a")
    for number in range(1, 5):
        step(driver, "a", number, between=1.5)
    observed = driver.machine.state.jobs["a"].watched.observed
    assert observed.rollout == (3.0, 3.0, 3.0) and observed.train == (2.0, 2.0, 2.0)  # the first step is left out
    assert observed.between == (2.5, 2.5)  # 1.5 s before training and the driver's 1 s before the next rollout
    errors = lines(driver, "estimate_error")
    assert len(errors) == 6 and errors[0]["source"] == "bound" and errors[0]["observed_s"] == 3.0
    assert errors[0]["ratio"] == pytest.approx(errors[0]["estimated_s"] / 3.0)


def test_after_a_few_steps_what_was_seen_replaces_the_bounds(driver):
    arrive(driver, "a")
    bound = driver.machine.state.placed.job("a")
    for number in range(1, 12):
        step(driver, "a", number, rollout=3.0 + number % 3)
    spec = driver.machine.state.placed.job("a")
    assert bound.rollout.source == "bound" and spec.rollout.source == "mean"
    assert spec.rollout_hold_s == pytest.approx(4.0, abs=0.5) and spec.rollout.bound_s == bound.rollout.bound_s
    assert spec.rollout.cv > 0.1 and lines(driver, "estimate_error")[-1]["source"] == "mean"


def test_a_job_that_brings_a_profile_is_placed_by_it():
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a", profiled=Observed(rollout=(3.0, 3.2, 2.8), train=(2.0, 2.0, 2.0)), owner="ann")
    spec = driver.machine.state.placed.job("a")
    assert (spec.rollout.source, spec.iteration_s, spec.owner) == ("profile", pytest.approx(5.0), "ann")
    assert not spec.movable and lines(driver, "placed")[0]["estimated"]["source"] == "profile"


def test_where_a_promise_is_about_to_break_the_tightest_goes_first_on_the_nodes_too():
    """Both fit by their bounds; then one turns out as long as they, the other a fraction."""
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a")
    arrive(driver, "b")
    assert driver.machine.state.jobs["b"].nodes["rollout"] == ["r0"]
    driver.ask("a", "rollout", 1, ["r0"])
    driver.ask("b", "train", 0, ["t0"])
    for number in range(1, 7):  # rollouts of 3 and 80 s, training of 2 and 60 s; nobody idles between its phases
        driver.now += 2
        driver.release("a")
        driver.ask("a", "train", number, ["t0"])
        driver.now += 56
        driver.release("b")
        driver.ask("b", "rollout", number, ["r0"])
        driver.release("a")
        driver.ask("a", "rollout", number + 1, ["r0"])
        driver.now += 78
        driver.release("b")
        driver.ask("b", "train", number, ["t0"])
    said = lines(driver, "slo_at_risk")
    assert said and said[0]["kind"] in ("order", "priority") and said[0]["reason"]
    state = driver.machine.state
    assert state.jobs["a"].watched.rank < state.jobs["b"].watched.rank
    driver.ask("b", "rollout", 7, ["r0"], key="before")
    driver.release("a")
    driver.ask("a", "rollout", 8, ["r0"], key="after")
    driver.release("b", next(lease.token for lease in state.leases_of("b") if lease.phase == "rollout"))
    assert driver.holders("r0") == ["a"]


def test_responses_that_grow_are_followed(driver):
    arrive(driver, "a")
    for number in range(1, 60):
        step(driver, "a", number, rollout=3.0 * (1 + number / 60), train=2.0 * (1 + number / 60))
    spec = driver.machine.state.placed.job("a")
    assert spec.rollout_hold_s == pytest.approx(6.0, rel=0.15) and spec.train.seconds == pytest.approx(4.0, rel=0.15)


def test_an_answer_about_other_records_is_void_and_the_question_stays(driver):
    arrive(driver, "a")
    asked = Asked(Arrive(driver.machine.state.placed.job("a")), Record(), driver.machine.config, frozenset(), 0.0)
    stale = Planner().answer(asked, {})
    before = driver.machine.state.placed
    driver.machine.state.questions.append(asked.question)
    driver.machine.handle(Input(driver.now, stale))
    assert driver.machine.state.placed is before and driver.machine.state.questions == [asked.question]


def test_leases_are_granted_while_the_placer_thinks():
    """A job registers, and has no answer yet; the others take their turns."""
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a")
    machine = driver.machine
    where = {"host": "here", "pid": 7, "started": 1}
    out = machine.handle(Input(9.0, m.Register(**driver.who("b"), nodes=AUTO, needs=needs(), **where)))
    assert not [step for step in out if isinstance(step, Send)] and machine.state.questions
    ask = m.LeaseRequest(**driver.who("a"), key="k", phase="rollout", step=1, nodes=["r0"])
    (granted,) = [step.message for step in machine.handle(Input(9.5, ask)) if isinstance(step, Send)]
    assert isinstance(granted, m.LeaseGrant)
    again = machine.handle(Input(9.6, m.Register(**driver.who("b"), nodes=AUTO, needs=needs(), **where)))
    assert [step.message.reason for step in again if isinstance(step, Send)] == ["job 'b' waits to be placed"]


def register(driver, job):
    """The machine alone: the placer thinks."""
    where = {"host": "here", "pid": 7, "started": 1}
    driver.machine.handle(Input(9.0, m.Register(**driver.who(job), nodes=AUTO, needs=needs(), **where)))


def where_told(sent):
    return [message.nodes for message in sent if isinstance(message, m.Registered)]


def test_a_job_that_only_asked_whether_it_would_be_taken_holds_nobody_up(driver):
    """It is forgotten at once, and still in its group while the placer answers those who asked before it left."""
    arrive(driver, "preflight")
    register(driver, "a")
    sent = driver.do(m.Deregister(**driver.who("preflight")))
    assert where_told(sent) == [{"rollout": ["r0"], "train": ["t0"]}]
    (group,) = driver.machine.state.placed.groups
    assert [job.name for job in group.jobs] == ["a"]


def test_a_job_that_left_and_came_again_is_not_told_the_answer_to_its_first_start(driver):
    register(driver, "a")
    driver.machine.handle(Input(9.1, m.Deregister(**driver.who("a"))))
    register(driver, "a")
    assert where_told(driver.do(m.Heartbeat(**driver.who("a"), beat=1))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_validation_is_not_taken_for_the_steps_rollout(driver):
    arrive(driver, "a")
    step(driver, "a", 1)
    step(driver, "a", 2)
    driver.ask("a", "rollout", 2, ["r0"], key="validation")
    driver.now += 500
    driver.release("a")
    assert driver.machine.state.jobs["a"].watched.observed.rollout == (3.0,)


def test_the_period_is_predicted_from_what_the_group_was_seen_to_take(driver):
    arrive(driver, "a")
    arrive(driver, "b")
    for cycle in range(4):  # rollouts of 3 and 4 s take turns, training (2 s each) goes on beside them
        for job, step, phase, start, end in (
            *(("a", cycle + 1, "rollout", 0, 3), ("a", cycle + 1, "train", 3, 5), ("b", cycle, "train", 0, 2)),
            *(("b", cycle + 1, "rollout", 3, 7),),
        ):
            if step > 0:
                driver.now = 100 + 7.0 * cycle + start - 1
                driver.ask(job, phase, step, ["r0" if phase == "rollout" else "t0"])
                driver.now = 100 + 7.0 * cycle + end - 1
                driver.release(job)
    first, both, last = lines(driver, "group_predicted")
    assert (first["source"], both["source"], last["source"]) == ("estimated", "estimated", "observed")
    # The rollouts on one node fill the cycle; alone, each job would take less.
    assert last["periods"] == pytest.approx({"a": 7.0, "b": 7.0})


def test_the_placement_is_replanned_when_a_job_leaves(driver):
    arrive(driver, "a")
    arrive(driver, "b")
    step(driver, "a", 1)
    driver.do(m.Deregister(**driver.who("a")))
    (group,) = driver.machine.state.placed.groups
    assert [job.name for job in group.jobs] == ["b"]
    assert list(lines(driver, "group_predicted")[-1]["periods"]) == ["b"]


def test_nodes_that_jobs_name_themselves_are_out_of_the_schedulers_hands():
    driver = Driver(Machine(placing_config(count=2)))
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t1"]}
    (refused,) = driver.register("late", nodes={"rollout": ["r1"], "train": ["t0"]})
    assert "names node 'r1', on which the coordinator has placed a" in refused.reason


def test_nobody_new_goes_to_a_draining_node_be_it_free_or_shared():
    driver = Driver(Machine(placing_config(count=2)))
    driver.do(NodeDrained(node="r0"))
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t0"]}
    driver.do(NodeDrained(node="t0"))
    driver.do(NodeDrained(node="r0", undo=True))
    assert arrive(driver, "b")[0].nodes["train"] == ["t1"]


def test_who_waits_goes_to_a_node_that_drains_no_more(driver):
    driver.do(NodeDrained(node="r0"))
    assert isinstance(arrive(driver, "a")[0], m.Queued)
    told = where_told(driver.do(NodeDrained(node="r0", undo=True)))
    assert told == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_node_that_drains_does_not_come_free_when_its_job_leaves(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    driver.do(NodeDrained(node="r0"))
    assert where_told(driver.do(m.Deregister(**driver.who("a")))) == []
    assert where_told(driver.do(NodeDrained(node="r0", undo=True))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_filler_takes_no_node_from_who_is_to_be_placed(driver):
    driver.register("sums", nodes={"train": ["train"], "rollout": ["rollout"]}, filler=True)
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r0"], "train": ["t0"]}


def test_who_waits_goes_where_a_job_was_that_named_its_nodes(driver):
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert isinstance(arrive(driver, "a")[0], m.Queued)
    assert where_told(driver.do(m.Deregister(**driver.who("named")))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_job_that_named_its_nodes_leaves_while_the_placer_thinks_about_another(driver):
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    register(driver, "a")
    machine = driver.machine
    no_room = Planner().answer(placing.asked(machine.state, machine.config, 9.0), {})
    machine.handle(Input(9.1, m.Deregister(**driver.who("named"))))
    assert where_told(driver.do(no_room)) == [{"rollout": ["r0"], "train": ["t0"]}]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"needs": None}, "does not say what it needs"),
        ({"slo": 0.5}, "slo is 0.5"),
        ({"profiled": Observed(rollout=(-1.0,), train=(1.0,))}, "profiled rollout phases [-1.0]"),
        ({"needs": needs(rollout_gpus=2)}, "2 GPUs on each rollout node; those of pool 'rollout' have 1"),
        ({"needs": needs(train_nodes=3)}, "needs 3 train nodes; pool 'train' has 1"),
    ],
)
def test_what_can_never_be_placed_is_refused(driver, keys, words):
    (refused,) = arrive(driver, "a", **keys)
    assert isinstance(refused, m.Refused) and words in refused.reason
    assert driver.machine.state.placed.groups == ()


def test_without_a_scheduler_nodes_must_be_named():
    driver = Driver(Machine(make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})))
    (refused,) = arrive(driver, "a")
    assert "no `placement: scheduler`" in refused.reason


def test_the_records_with_placements_survive_the_journals_encoding(driver):
    arrive(driver, "a")
    arrive(driver, "b")
    step(driver, "a", 1)
    step(driver, "a", 2)
    state = driver.machine.state
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)
    assert again == state
    config = driver.machine.config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_a_restart_keeps_the_placement_and_decides_as_before(tmp_path):
    config = placing_config(count=2)
    journal = Journal(tmp_path / "journal")
    machine = journal.restore(config, "first", Before.NOBODY)
    driver = Driver(machine)
    for job in ("a", "b"):
        arrive(driver, job, slo=1.2)
    for event in driver.events:
        journal.append(event)
    journal.close()
    restored = Journal(tmp_path / "journal").restore(config, "second", Before.NOBODY)
    assert restored.state == msgspec.structs.replace(machine.state, token=restored.state.token)
    again = Driver(restored)
    again.now = driver.now
    assert arrive(again, "c", slo=1.2) and arrive(driver, "c", slo=1.2)
    assert restored.state.placed == machine.state.placed


def test_a_coordinator_that_lost_its_memory_finds_jobs_where_they_say_they_are():
    driver = Driver(Machine(placing_config(count=2)))
    where = {"rollout": ["r1"], "train": ["t1"]}
    for job in ("a", "b"):
        answer = arrive(driver, job, again=True, placed=where)[0]
        assert answer.nodes == where
    (group,) = driver.machine.state.placed.groups
    assert {job.name for job in group.jobs} == {"a", "b"}
    assert arrive(driver, "c", slo=1.0)[0].nodes == {"rollout": ["r0"], "train": ["t0"]}


def test_the_status_shows_groups_periods_and_who_waits(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    about = {"address": "tcp://here", "journal": {"path": None, "lost": None, "blocked": None}, "settling_s": None}
    seen = {**about, **describe(driver.machine.state, driver.machine.config, driver.now, {})}
    assert seen["placement"]["waiting"] == ["b"]
    (group,) = seen["placement"]["groups"].values()
    assert group["nodes"] == {"rollout": ["r0"], "train": ["t0"]} and set(group["periods"]) == {"a"}
    text = plain(seen)
    assert "group g1: r0, t0; a " in text and "waiting for nodes; b" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": "solver"}, "placement"),
        ({"placement": {"train": "nowhere"}}, "placement.train is 'nowhere'; it must be a pool: rollout, train"),
        ({"placement": {"train": "rollout"}}, "two pools are needed"),
        ({"placement": {"slo": 0.9}}, "placement.slo is 0.9"),
        ({"placement": {"cap": 0}}, "cap is 0"),
        ({"placement": {"observe": 0}}, "placement.observe is 0"),
        ({"placement": {"kinds": {"cpu": {"tflops": 0, "tb_per_s": 1}}}}, "tflops is 0"),
        ({"placement": {"kinds": {"other": CPU}}}, "GPU kind 'cpu' is not known"),
        ({"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}}, "has no kind"),
        (
            {"pools": {**pools(), "rollout": {"kind": "cpu", "nodes": [{"name": "r0"}, {"name": "r1", "gpus": 2}]}}},
            "different gpus (1, 2)",
        ),
        (
            {"pools": {**pools(), "rollout": {"kind": "H100", "nodes": [{"name": "r0"}]}}},
            "pool 'rollout' (H100) has no price",
        ),
    ],
)  # fmt: skip
def test_a_bad_placement_configuration_is_refused_in_one_line(change, words):
    if isinstance(change.get("placement"), dict):
        change = {"placement": {"kinds": {"cpu": CPU}, **change["placement"]}}
    given = {"pools": pools(), "placement": {"kinds": {"cpu": CPU}}, **change}
    with pytest.raises(UserError) as error:
        make_config(given)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_word_scheduler_stands_for_the_defaults():
    given = {side: {"kind": "H20", "nodes": [{"name": side[0] + "0", "gpus": 8}]} for side in ("rollout", "train")}
    assert make_config({"pools": given, "placement": "scheduler"}).placement.slo == 2.0


def test_a_client_waits_for_nodes_as_long_as_it_takes(serve, join, eventually):
    coordinator = serve(pools=pools(), placement={"kinds": {"cpu": CPU}})
    first = join(coordinator, "a", AUTO, needs=needs(), slo=1.0)
    assert first.nodes == {"rollout": ["r0"], "train": ["t0"]}
    asked = join(coordinator, "probe", AUTO, needs=needs(), slo=1.0, wait=False)
    assert asked.nodes == {}
    asked.close()
    with concurrent.futures.ThreadPoolExecutor() as executor:
        second = executor.submit(join, coordinator, "b", AUTO, needs=needs(), slo=1.0, timeout=1.0)
        eventually(lambda: coordinator.snapshot()["placement"]["waiting"] == ["b"])
        first.close()
        assert second.result(60).nodes == {"rollout": ["r0"], "train": ["t0"]}
        with second.result().phase("rollout", step=1) as lease:
            assert lease.nodes == ["r0"]
