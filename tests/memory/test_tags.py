"""The whole table against what it must mean: which tags are awake before, which afterwards, and nothing in between."""

from itertools import product

import pytest

from verl_mux.memory.tags import LEVELS, Moved, SleepState, SleepStates, total

BOTH = {"weights", "kv_cache"}
AWAKE_TAGS = {
    SleepState.ACTIVE: BOTH,
    SleepState.KV_RELEASED: {"weights"},
    SleepState.ASLEEP_1: set(),
    SleepState.ASLEEP_2: set(),
}
REQUESTS = [["weights"], ["kv_cache"], ["weights", "kv_cache"], ["kv_cache", "weights"]]
EVERY = list(product(AWAKE_TAGS, ("sleep", "wake"), REQUESTS, LEVELS))


def wanted(state: SleepState, verb: str, tags: list[str]) -> set[str]:
    awake = AWAKE_TAGS[state]
    return awake - set(tags) if verb == "sleep" else awake | set(tags)


@pytest.mark.parametrize(("state", "verb", "tags", "level"), EVERY)
def test_a_step_moves_just_the_tags_that_differ_or_is_refused(state, verb, tags, level):
    states = SleepStates(state)
    target = wanted(state, verb, tags)
    if target not in AWAKE_TAGS.values():  # the KV cache without the weights
        with pytest.raises(ValueError, match=f"cannot {verb} .* while the engine is {state.value}"):
            states.plan(verb, tags, level)
    else:
        steps = states.plan(verb, tags, level)
        after = steps[-1][1] if steps else state
        assert AWAKE_TAGS[after] == target
        assert {tag for tag, _ in steps} == AWAKE_TAGS[state] ^ target
    assert states.state is state


@pytest.mark.parametrize("level", LEVELS)
def test_weights_wake_first_and_sleep_last_at_the_level_that_is_asked(level):
    down = SleepStates(SleepState.ACTIVE).plan("sleep", ["weights", "kv_cache"], level)
    assert down == [("kv_cache", SleepState.KV_RELEASED), ("weights", LEVELS[level])]
    up = SleepStates(LEVELS[level]).plan("wake", ["kv_cache", "weights"])
    assert up == [("weights", SleepState.KV_RELEASED), ("kv_cache", SleepState.ACTIVE)]


@pytest.mark.parametrize(("state", "verb", "tags", "level"), EVERY)
def test_what_was_done_is_not_done_twice(state, verb, tags, level):
    states = SleepStates(state)
    try:
        steps = states.plan(verb, tags, level)
    except ValueError:
        return
    for _, after in steps:
        states.state = after
    assert states.plan(verb, tags, level) == []


@pytest.mark.parametrize("state", list(LEVELS.values()))
def test_a_sleeping_engine_stays_at_its_level(state):
    states = SleepStates(state)
    assert [states.plan("sleep", sorted(BOTH), level) for level in LEVELS] == [[], []]
    assert LEVELS[states.level] is state


@pytest.mark.parametrize("verb", ["sleep", "wake"])
@pytest.mark.parametrize("tags", [[], ["weights", "graphs"], ["everything"]])
def test_unknown_tags_are_refused(verb, tags):
    for state in AWAKE_TAGS:
        with pytest.raises(ValueError, match="tags are"):
            SleepStates(state).plan(verb, tags)


@pytest.mark.parametrize(("verb", "tags"), list(product(("sleep", "wake"), REQUESTS)))
def test_only_a_restart_leaves_failed(verb, tags):
    states = SleepStates()
    states.state = SleepState.FAILED
    with pytest.raises(ValueError, match="failed"):
        states.plan(verb, tags)


ACTOR = {"params": Moved(10, 10, 1.0), "optimizer": Moved(20, 20, 2.0)}
REFERENCE = {"params": Moved(5, 7, 3.0)}


def test_bytes_add_up_and_the_slowest_of_those_that_move_together_counts():
    assert total([ACTOR, REFERENCE]) == {"params": Moved(15, 17, 3.0), "optimizer": Moved(20, 20, 2.0)}
    assert total([ACTOR, REFERENCE], seconds=sum)["params"] == Moved(15, 17, 4.0)
