"""Theorem 1 holds on one node a side, and not on two rollout nodes."""

from verl_mux.simulation.theorem import check_one_by_one, counter_example


def test_no_unsaturated_group_on_one_node_a_side_exceeds_its_cycle():
    found = check_one_by_one(groups=300, seed=1)
    assert (found.groups, found.violations) == (300, 0)


def test_two_rollout_nodes_suffice_to_exceed_it():
    found = counter_example(tries=200)
    assert found.load_s < found.cycle_s < max(found.periods_s.values())
    assert str(found).startswith(f"T_cycle {found.cycle_s:g} s, T_load {found.load_s:g} s")
