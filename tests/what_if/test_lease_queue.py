"""The coordinator's queue over jobs that are run again."""

from verl_mux.what_if.lease_queue import LeaseQueue

NODES = {"wide": {"rollout": ["r0", "r1"], "train": ["t0"]}, "narrow": {"rollout": ["r1"], "train": ["t0"]}}
STEPS = dict.fromkeys(NODES, 2)


def test_who_asks_gets_all_its_nodes_or_waits_for_them():
    queue = LeaseQueue(NODES, STEPS, "interleaved")
    queue.ask("wide", "rollout", 1)
    queue.ask("narrow", "rollout", 1)
    assert list(queue.granted()) == ["wide"] and queue.gangs("wide") == [["r1"]]
    queue.give_back("wide", ["r0"])
    assert not list(queue.granted())
    queue.give_back("wide", ["r1"])
    assert list(queue.granted()) == ["narrow"] and queue.gangs("narrow") == []


def test_in_a_sequential_part_the_other_waits_until_the_first_is_through():
    queue = LeaseQueue(NODES, STEPS, "sequential")
    for step in (1, 2):
        queue.ask("wide", "rollout", step)
        if step == 1:
            queue.ask("narrow", "rollout", 1)
        assert list(queue.granted()) == ["wide"]
        queue.give_back("wide")
        queue.ended("wide", step)
    assert list(queue.granted()) == ["narrow"]
