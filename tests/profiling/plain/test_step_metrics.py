"""A step's figures."""

import json
import math

import pytest

from tests.profiling.made_logs import Made, make_run, read_run
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog
from verl_mux.profiling.plain.step_metrics import metrics_of_step, step_lines, step_metrics
from verl_mux.profiling.report.measures.analysis import Analysis, step_shares


def test_completion_is_the_reports(tmp_path):
    make_run(tmp_path, Made(steps=2, workers=3, requests=20))
    metrics = step_metrics(step_lines(tmp_path, 2))
    row = Analysis(read_run(tmp_path)).by_step.row(1, named=True)
    for name in ("p50", "p80", "p90", "p95", "p99", "total", "t80_over_total"):
        assert metrics[f"mux/completion/{name}"] == pytest.approx(row[name], abs=1e-5)
    assert metrics["mux/requests"] == 60


def test_shares_waits_and_switches_are_the_reports(tmp_path):
    make_mux_run(tmp_path, alone=1, together=2)
    metrics = step_metrics(step_lines(tmp_path / "fibonacci" / "events", 2))
    tables = read_run(tmp_path).tables
    rows = step_shares(tables).filter(job="fibonacci", step=2, role="trainer")
    told = {f"mux/share/{event}": share for event, share in rows.select("event", "share").rows() if share > 0}
    assert {name: metrics[name] for name in told} == pytest.approx(told)
    assert metrics["mux/wake/bytes"] == 40e6 + 25e6 + 80e6
    assert metrics["mux/sync/seconds"] == pytest.approx(0.2)
    assert metrics.keys() >= {"mux/lease_wait/rollout", "mux/lease_wait/train"}


def test_every_metric_is_a_finite_number(tmp_path):
    make_mux_run(tmp_path, alone=1, together=1)
    metrics = step_metrics(step_lines(tmp_path / "products" / "events", 2))
    assert metrics
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_no_events_no_metrics():
    assert step_metrics([]) == {}


def test_odd_lines_do_no_harm(tmp_path):
    odd = [
        *({}, [], {"event": 3}, {"event": "async_rollout_request_complete", "extra": {"request_id": 1}, "timestamp": 7}),
        *({"event": "sync", "extra": [], "duration_sec": "x"}, {"event": "sync", "timestamp": "2026-01-05T09:00:00"}),
    ]
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "worker_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd) + '{"event": "sy')
    assert step_metrics(step_lines(tmp_path, 1)) == {"mux/sync/seconds": 0.0, "mux/sync/bytes": 0.0}


def test_reading_a_step_stops_at_its_limit(tmp_path):
    make_run(tmp_path, Made(steps=1, workers=2, requests=10))
    assert list(step_lines(tmp_path, 1, max_bytes=10)) == []


def test_of_logs_beyond_the_limit_only_whole_figures_are_told(tmp_path):
    make_mux_run(tmp_path, alone=1, together=1)
    events = tmp_path / "fibonacci" / "events"
    everything = step_metrics(step_lines(events, 2))
    size = sum(path.stat().st_size for path in events.glob("*/step_2/*.jsonl"))
    metrics = step_metrics(step_lines(events, 2, max_bytes=size - 1))
    assert "mux/requests" in everything and "mux/requests" not in metrics
    assert metrics["mux/lease_wait/rollout"] == everything["mux/lease_wait/rollout"]
    assert step_metrics(step_lines(events, 2, max_bytes=size)) == everything


def test_a_trainers_metrics_come_from_the_files_beside_its_log(tmp_path):
    log = EventLog(tmp_path, role="trainer", job="a", step=1)
    rollout = EventLog(tmp_path, role="rollout", job="a", step=1)
    for number in range(5):
        rollout.log(
            "async_rollout_request_complete", 1.0 + number, {"request_id": str(number), "turns": 1}, timestamp=1e9 + number
        )
    log.log("phase", 4.0, {"phase": "rollout"})
    log.log("step", 10.0)
    metrics = metrics_of_step(log, 1)
    assert metrics["mux/requests"] == 5
    assert metrics["mux/unused/rollout"] == pytest.approx(0.6)
    assert metrics_of_step(log, 2) == metrics_of_step(NULL_LOG, 1) == {}


def test_verls_trackers_take_the_metrics(tmp_path, monkeypatch):
    """tensorboard and wandb offline, through verl's own Tracking."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    make_run(tmp_path / "log", Made(steps=1, workers=2, requests=10))
    metrics = step_metrics(step_lines(tmp_path / "log", 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking("project", "run", default_backend=["tensorboard", "wandb"], config={})
    tracking.log(metrics, step=1)
    tracking.logger["wandb"].finish()
    wandb.teardown()  # waits for the process that writes
    tracking.logger["tensorboard"].finish()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kept = offline.read_bytes()
    for name, value in metrics.items():
        assert name.encode() in kept
        assert board.Scalars(name)[0].value == pytest.approx(value, rel=1e-5)
