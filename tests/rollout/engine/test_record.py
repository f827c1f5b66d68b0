"""What the rest of verl_mux knows of an engine."""

import pytest

from verl_mux.rollout.engine.record import engines


def test_reading_the_records_imports_no_engine(python):
    code = "import sys; from verl_mux.rollout.engine.record import engines; print(*engines(), *sys.modules)"
    printed = python("-c", code).stdout.split()
    assert "sglang" in printed[: len(engines())]
    assert not {"verl", "torch", "ray"} & set(printed) and "sglang" not in printed[len(engines()) :]


def test_each_is_found_by_the_name_that_verl_has_for_it():
    assert all(name == engine.name for name, engine in engines().items())


@pytest.mark.parametrize(("policy", "given"), [(None, True), ("fcfs", True), ("lof", True), ("lpm", False)])
def test_sglang_takes_priorities_with_two_policies_only(policy, given):
    arguments = engines()["sglang"].priority_arguments({} if policy is None else {"schedule_policy": policy})
    assert arguments.get("enable_priority_scheduling", False) is given and bool(arguments) is given
