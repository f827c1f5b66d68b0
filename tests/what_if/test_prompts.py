"""Prompt groups drawn from recordings, in order, by chance, and in tail rounds."""

from collections import Counter
from itertools import islice

from verl_mux.rollout.control.tail_rounds import DeferPolicy
from verl_mux.what_if.foresight import Foresight
from verl_mux.what_if.prompts import Rounds, in_order, resampled
from verl_mux.what_if.recording import Group, Recording, Sample

PROMPTS, EPOCHS, BATCH = 24, 3, 4


def _recording(named: bool) -> Recording:
    """Every sixth prompt is ten times as long, in each epoch."""
    groups = []
    for at in range(PROMPTS * EPOCHS):
        number = at % PROMPTS
        sample = Sample(1000 + at if number % 6 == 0 else 100 + at, 0, 0.0, None)
        groups.append(Group(f"g{at}", at // BATCH, (sample, sample), str(number) if named else None))
    return Recording("a", {}, tuple(groups), (), replicas=1, slots=None, unknown=0)


def test_the_recorded_order_comes_first():
    recording = _recording(named=True)
    assert tuple(islice(in_order(recording, 0), PROMPTS * EPOCHS)) == recording.groups


def test_a_step_that_is_drawn_by_chance_stays_together():
    drawn = list(islice(resampled(_recording(named=False), 1), 5 * BATCH))
    assert all(len({group.step for group in drawn[at : at + BATCH]}) == 1 for at in range(0, 5 * BATCH, BATCH))


def test_a_prompt_that_recurs_is_drawn_with_all_its_epochs_and_is_never_known_beforehand():
    drawn = list(islice(resampled(_recording(named=True), 1), 4 * PROMPTS * EPOCHS))
    assert max(Counter(group.prompt for group in drawn).values()) == EPOCHS
    assert max(Counter((group.prompt, group.name) for group in drawn).values()) == 1


def test_tail_rounds_gather_the_long_prompts_once_earlier_epochs_have_told_them():
    recording = _recording(named=True)
    foresight = Foresight("default", 0)
    rounds = Rounds(iter((*recording.groups, recording.groups[0])), DeferPolicy(max_mean=9.0), BATCH, 2, foresight, PROMPTS)
    long, seen = [], []
    for _ in range(PROMPTS * EPOCHS // BATCH):
        drawn = rounds.draw(BATCH)
        seen += [group.name for _, group in drawn]
        long.append(sum(group.samples[0].tokens >= 1000 for _, group in drawn))
        rounds.trained({name: [sample.tokens for sample in group.samples] for name, group in drawn})
    assert Counter(seen) == Counter(group.name for group in recording.groups)
    steps = PROMPTS // BATCH
    assert sorted(long[:steps]) == [0, 0, 1, 1, 1, 1]  # as they came
    assert sorted(long[steps : 2 * steps]) == sorted(long[2 * steps :]) == [0, 0, 0, 0, 0, 4]
