import pickle

from verl_mux.memory.moved import Moved, total

ACTOR = {"params": Moved(10, 10, 1.0), "optimizer": Moved(20, 20, 2.0)}
REFERENCE = {"params": Moved(5, 7, 3.0)}


def test_bytes_add_up_and_the_slowest_of_those_that_move_together_counts():
    assert total([ACTOR, REFERENCE]) == {"params": Moved(15, 17, 3.0), "optimizer": Moved(20, 20, 2.0)}


def test_what_moves_one_after_another_takes_the_sum_of_seconds():
    assert total([ACTOR, REFERENCE], seconds=sum)["params"] == Moved(15, 17, 4.0)


def test_nothing_moved_is_nothing():
    assert total([]) == total([{}, {}]) == {}


def test_it_travels_between_processes():
    assert pickle.loads(pickle.dumps(ACTOR)) == ACTOR
