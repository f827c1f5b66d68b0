"""The whole table against what it must mean: which tags are awake before, which afterwards, and nothing in between."""

from itertools import product

import pytest

from verl_mux.memory.sleep_states import SleepState, SleepStates

AWAKE_TAGS = {
    SleepState.AWAKE: {"weights", "kv_cache"},
    SleepState.WEIGHTS_AWAKE: {"weights"},
    SleepState.ASLEEP: set(),
}
REQUESTS = [["weights"], ["kv_cache"], ["weights", "kv_cache"], ["kv_cache", "weights"]]


def wanted(state: SleepState, verb: str, tags: list[str]) -> set[str]:
    awake = AWAKE_TAGS[state]
    return awake - set(tags) if verb == "sleep" else awake | set(tags)


@pytest.mark.parametrize(("state", "verb", "tags"), list(product(AWAKE_TAGS, ("sleep", "wake"), REQUESTS)))
def test_a_step_moves_just_the_tags_that_differ_or_is_refused(state, verb, tags):
    states = SleepStates(state)
    target = wanted(state, verb, tags)
    if target not in AWAKE_TAGS.values():  # the KV cache without the weights
        with pytest.raises(ValueError, match=f"cannot {verb} .* while the engine is {state.value}"):
            states.plan(verb, tags)
    else:
        steps, after = states.plan(verb, tags)
        assert AWAKE_TAGS[after] == target
        assert set(steps) == AWAKE_TAGS[state] ^ target
    assert states.state is state


@pytest.mark.parametrize(("verb", "order"), [("sleep", ("kv_cache", "weights")), ("wake", ("weights", "kv_cache"))])
def test_weights_wake_first_and_sleep_last(verb, order):
    start = SleepState.AWAKE if verb == "sleep" else SleepState.ASLEEP
    assert SleepStates(start).plan(verb, ["kv_cache", "weights"])[0] == order


@pytest.mark.parametrize(("state", "verb", "tags"), list(product(AWAKE_TAGS, ("sleep", "wake"), REQUESTS)))
def test_what_was_done_is_not_done_twice(state, verb, tags):
    states = SleepStates(state)
    try:
        states.done(states.plan(verb, tags)[1])
    except ValueError:
        return
    assert states.plan(verb, tags) == ((), states.state)


@pytest.mark.parametrize("state", list(SleepState))
def test_a_failed_engine_does_nothing_any_more(state):
    states = SleepStates(state)
    states.failed()
    for verb, tags in product(("sleep", "wake"), REQUESTS):
        with pytest.raises(ValueError, match="failed"):
            states.plan(verb, tags)
    assert states.state is SleepState.FAILED


@pytest.mark.parametrize("tags", [[], ["cuda_graph"], ["weights", "other"]])
def test_tags_that_are_not_ours_are_refused(tags):
    with pytest.raises(ValueError, match=r"tags are \['weights', 'kv_cache'\]"):
        SleepStates().plan("sleep", tags)


def test_an_unknown_verb_is_refused():
    with pytest.raises(ValueError):
        SleepStates().plan("doze", ["weights"])


def test_a_job_s_whole_day_ends_where_it_began():
    states = SleepStates()
    moved = []
    for verb, tags in [
        ("sleep", ["weights", "kv_cache"]), ("wake", ["weights"]), ("wake", ["weights"]), ("wake", ["kv_cache"]),
        ("sleep", ["kv_cache"]), ("wake", ["kv_cache"]), ("sleep", ["weights", "kv_cache"]), ("sleep", ["weights", "kv_cache"]),
    ]:  # fmt: skip
        steps, after = states.plan(verb, tags)
        moved += [(verb, step) for step in steps]
        states.done(after)
    assert states.state is SleepState.ASLEEP
    assert moved == [
        ("sleep", "kv_cache"), ("sleep", "weights"), ("wake", "weights"), ("wake", "kv_cache"),
        ("sleep", "kv_cache"), ("wake", "kv_cache"), ("sleep", "kv_cache"), ("sleep", "weights"),
    ]  # fmt: skip
