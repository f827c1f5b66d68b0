"""Orders within a group: trying several is never worse than FIFO."""

from verl_mux.simulation.orders import compare_orders


def test_the_best_of_all_orders_keeps_every_slo_that_fifo_keeps_and_some_more():
    found = compare_orders(groups=120, rollout_nodes=3)
    assert found.feasible["any"] == max(found.feasible["any"], *found.feasible.values())
    assert found.feasible["any"] == found.feasible["fifo"] + found.improved


def test_in_rounds_nobody_exceeds_the_cycle_on_one_node_a_side():
    assert compare_orders(groups=60, rollout_nodes=1).beyond_cycle["rounds"] == 0
