"""What placed jobs are seen to take takes the place of estimates."""

import pytest

from tests.coordinator.core.placement.placed_jobs import arrive, lines, placing_config, step
from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.placed_jobs import Standing
from verl_mux.coordinator.core.state import Machine


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
    assert spec.rollout_hold_s == pytest.approx(4.0, abs=0.5)
    assert spec.rollout.cv > 0.1 and lines(driver, "estimate_error")[-1]["source"] == "mean"


def test_what_steps_would_have_taken_alone_is_what_they_took_then_without_waiting(driver):
    arrive(driver, "a")
    for number in range(1, 21):
        step(driver, "a", number, rollout=3.0 if number < 11 else 30.0, between=1.5)
    driver.ask("a", "rollout", 21, ["r0"])
    driver.now += 100
    at = Standing(driver.machine.state, driver.now)["a"]
    spec = driver.machine.state.placed.job("a")
    took = 10 * (3.0 + 2.0) + 10 * (30.0 + 2.0) + 20 * 2.5  # with the driver's 1 s before the next rollout
    assert at.done == 20 and at.solo_s == pytest.approx(took) and at.solo_s < 0.8 * 20 * spec.iteration_s


def test_how_many_steps_are_left_is_as_the_job_says():
    driver = Driver(Machine(placing_config()))
    arrive(driver, "a")
    arrive(driver, "b", steps=30)
    for number in range(1, 4):
        for job in "ab":
            step(driver, job, number)

    def left():
        return {job: at.left for job, at in Standing(driver.machine.state, driver.now).items()}

    assert left() == {"a": None, "b": 28}, "of 30 steps two are known to be done"
    driver.do(m.StepReport(**driver.who("a"), step=3, metrics={}, steps=10))
    driver.do(m.StepReport(**driver.who("b"), step=3, metrics={}))
    assert left() == {"a": 7, "b": 27}
    driver.do(m.StepReport(**driver.who("a"), step=12, metrics={}))
    assert left() == {"a": 0, "b": 27}


def test_a_validation_is_not_taken_for_the_steps_rollout(driver):
    arrive(driver, "a")
    step(driver, "a", 1)
    step(driver, "a", 2)
    driver.ask("a", "rollout", 2, ["r0"], key="validation")
    driver.now += 500
    driver.release("a")
    assert driver.machine.state.jobs["a"].watched.observed.rollout == (3.0,)


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


def test_where_a_promise_is_about_to_break_the_tightest_goes_first_on_the_nodes_too():
    """Both fit by their bounds; then one turns out as long as they, the other a fraction."""
    driver = Driver(Machine(placing_config(count=1)))
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


def test_the_period_is_predicted_from_what_the_group_was_seen_to_take(driver):
    arrive(driver, "a")
    arrive(driver, "b")
    for cycle in range(4):  # rollouts of 3 and 4 s take turns, training (2 s each) goes on beside them
        for job, number, phase, start, end in (
            *(("a", cycle + 1, "rollout", 0, 3), ("a", cycle + 1, "train", 3, 5), ("b", cycle, "train", 0, 2)),
            *(("b", cycle + 1, "rollout", 3, 7),),
        ):
            if number > 0:
                driver.now = 100 + 7.0 * cycle + start - 1
                driver.ask(job, phase, number, ["r0" if phase == "rollout" else "t0"])
                driver.now = 100 + 7.0 * cycle + end - 1
                driver.release(job)
    first, both, last = lines(driver, "group_predicted")
    assert (first["source"], both["source"], last["source"]) == ("estimated", "estimated", "observed")
    # The rollouts on one node fill the cycle; alone, each job would take less.
    assert last["periods"] == pytest.approx({"a": 7.0, "b": 7.0})
