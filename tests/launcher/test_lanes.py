"""The picture of a run."""

import pytest

from verl_mux.coordinator.config import make_config
from verl_mux.launcher import run_summary
from verl_mux.launcher.run_intervals import Span, Timeline

pyplot = pytest.importorskip("matplotlib.pyplot")


def drawn(spans: list[Span], tmp_path, monkeypatch):
    """The axes, and the picture on disk."""
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    config = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}})
    run_summary.draw(Timeline(spans, [], [], []), config, ["a", "b"], tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").stat().st_size > 0
    return figures[0].axes[0]


def spans(steps: int) -> list[Span]:
    return [
        Span(job, "rollout", step, 20 * step + at, 20 * step + at + 9, (node,))
        for step in range(1, steps + 1)
        for at, job, node in ((0, "a", "r0"), (10, "b", "r0"), (10, "a", "t0"))
    ]


def test_spans_that_are_wide_enough_have_their_steps_number(tmp_path, monkeypatch):
    texts = [text.get_text() for text in drawn(spans(3), tmp_path, monkeypatch).texts]
    assert sorted(filter(str.isdigit, texts)) == sorted(3 * ["1", "2", "3"])


def test_a_run_of_weeks_is_drawn_with_a_shape_for_each_job_and_node(tmp_path, monkeypatch):
    axes = drawn(spans(1000), tmp_path, monkeypatch)
    assert len(axes.collections) == 3 and not axes.patches
    assert not any(text.get_text().isdigit() for text in axes.texts)
