"""Length predictors: what each learns, and that the default never orders worse than a running mean."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rollouts.predictor import kendall_tau
from tests.rollout.lengths.length_generators import KINDS, generate
from verl_mux.errors import UserError
from verl_mux.rollout.lengths.predictors import PREDICTORS, LengthRow, Prompt, make_predictor


def taus(name: str, epochs: list[list[LengthRow]]) -> list[float]:
    predictor = make_predictor(name)
    out = []
    for epoch in epochs:
        scores = predictor.predict([row.prompt for row in epoch])
        out.append(kendall_tau(scores, np.array([row.length for row in epoch])))
        predictor.observe(epoch)
    return out


def row(name: str, length: int, epoch: int = 0, text: str | None = None) -> LengthRow:
    return LengthRow(Prompt(name, f"text of {name}" if text is None else text), epoch, length)


# The text of `story` and `keyword` decides lengths; the rest must at least not mislead. A first epoch without noise is the
# one case that cannot be told from a noisy one.
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_orders_no_epoch_worse_than_the_running_mean(kind):
    epochs = generate(kind, seed=1)
    for number, (ours, running) in enumerate(zip(taus("default", epochs), taus("history", epochs), strict=True)):
        assert ours >= running - 0.005, f"epoch {number}"


@pytest.mark.parametrize("kind", ["story", "keyword", "keyword_half_attending", "keyword_samples"])
def test_the_default_orders_better_where_text_tells_and_history_is_short(kind):
    epochs = generate(kind, seed=2)
    assert taus("default", epochs[:2])[1] > taus("history", epochs[:2])[1] + 0.005


def test_a_few_runaway_responses_do_not_hide_what_the_text_says():
    epochs = generate("runaway", seed=7, prompts=1000)
    assert taus("default", epochs)[3] > taus("history", epochs)[3] + 0.02


def test_the_default_orders_prompts_it_never_saw_by_their_text():
    assert taus("default", generate("never_recurring", seed=3))[1] > 0.2


def test_the_default_knows_a_prompt_by_its_text_when_its_id_changed():
    assert taus("default", generate("new_ids_same_text", seed=3))[1] > 0.3


def test_the_default_keeps_the_order_of_arrival_before_it_has_seen_anything():
    assert not make_predictor("default").predict([Prompt("a", "prove it"), Prompt("b", "")]).any()


def test_chance_leaves_the_default_with_the_running_means_own_order():
    epochs = generate("chance", seed=4)
    assert taus("default", epochs) == taus("history", epochs)


@pytest.mark.parametrize("name", PREDICTORS)
def test_odd_prompts_are_scored_like_any_other(name):
    prompts = [
        Prompt("empty", ""),
        Prompt("blank", " \n\t"),
        Prompt("huge", "word " * 200_000),
        Prompt("one huge word", "x" * 1_000_000),
        Prompt("chinese", "\u8bf7\u8be6\u7ec6\u89e3\u91ca\u91cf\u5b50\u529b\u5b66"),
        Prompt("emoji", "\U0001f600" * 50),
        Prompt("lone surrogate", "\ud800"),
        Prompt("digits", "9" * 5000),
        Prompt("arabic digits", "\u0661\u0662\u0663"),
        Prompt("nul", "\x00"),
    ]
    predictor = make_predictor(name)
    predictor.observe([])
    for epoch in range(3):
        scores = predictor.predict(prompts)
        assert scores.shape == (len(prompts),)
        assert np.isfinite(scores).all()
        predictor.observe([LengthRow(p, epoch, 10 * at) for at, p in enumerate(prompts) for _ in range(10)])
    assert np.isfinite(predictor.predict([*prompts, Prompt("new", "new")])).all()
    assert predictor.predict([]).shape == (0,)


def test_equal_lengths_and_a_single_prompt_are_no_obstacle():
    predictor = make_predictor("default")
    predictor.observe([row(f"p{i}", 7) for i in range(100)])
    assert np.isfinite(predictor.predict([Prompt("p3", "text of p3"), Prompt("new", "new")])).all()
    alone = make_predictor("default")
    alone.observe([row("a", 5)])
    assert np.isfinite(alone.predict([Prompt("a", "text of a")])).all()


def test_epochs_may_be_missing_or_come_late():
    predictor = make_predictor("default")
    for epoch in (0, 7, 3, 100, -2, *range(200, 215)):
        predictor.observe([row(f"p{i}", 10 + i, epoch) for i in range(80)])
    scores = predictor.predict([Prompt(f"p{i}", f"text of p{i}") for i in range(80)])
    assert kendall_tau(scores, np.arange(80)) > 0.95


def test_the_heuristic_reads_what_is_asked_for_and_the_token_limit():
    predictor = make_predictor("heuristic")
    texts = ["Answer in one word.", "Write an essay of 2000 words.", "Tell a short story."]
    word, essay, story = predictor.predict([Prompt(t, t) for t in texts])
    assert word < story < essay
    assert predictor.predict([Prompt("x", texts[1], token_limit=50)])[0] == 50


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="'bert'; allowed: default, fifo"):
        make_predictor("bert")
