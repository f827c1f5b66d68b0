"""What a trainer logs beside verl's metrics: the log and figures of verl's own modes; tables and plots through verl's
Tracking."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from tests.profiling.made_engines import make
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.eventlog.log import EventLog
from verl_mux.profiling.plain.step_metrics import step_lines
from verl_mux.trainer.tracking import instrument, log_tables
from verl_mux.worker_settings import WorkerSettings


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path / "run" / "a" / "events", role="trainer", job="a")


@pytest.fixture
def lines(tmp_path):
    make(tmp_path / "run", seed=1, steps=1, requests=30, replicas=2)
    return list(step_lines(tmp_path / "run" / "a" / "events", 1))


class Recorder:
    """verl's Tracking with other trackers."""

    def __init__(self, *backends: str, broken: bool = False) -> None:
        self.logger, self.calls, self._broken = dict.fromkeys(backends), [], broken

    def log(self, data, step, backend=None):
        if self._broken:
            raise ConnectionError("no route to the tracker")
        self.calls.append((step, backend, sorted(data)))
        self.data = data


def test_wandb_offline_keeps_tables_and_plots(lines, log, tmp_path, monkeypatch):
    import wandb
    from verl.utils.tracking import Tracking

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking("project", "run", default_backend=["tensorboard", "wandb"], config={})
    log_tables(tracking, log, lines, step=1, every=1)
    tracking.log({"mux/requests": 30.0}, step=1)
    tracking.logger["wandb"].finish()
    wandb.teardown()  # waits for the process that writes
    tracking.logger["tensorboard"].finish()
    (kept,) = tmp_path.glob("wandb/offline-run-*/files/media/table/mux_tables/replicas_*.table.json")
    table = json.loads(kept.read_text())
    assert table["columns"][:3] == ["replica", "node", "stays"]
    assert [row[:2] for row in table["data"]] == [["0", "r0"], ["1", "r1"]]
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    plot = '{"panel_type":"Vega2","panel_config":{"panelDefId":"wandb/line/v0","fieldSettings":{"x":"seconds","y":"part_done"'
    for text in ("mux_tables/slowest_requests", "mux_tables/completion_curve", plot, "mux/requests"):
        assert text.encode() in offline.read_bytes()


@pytest.mark.parametrize(("step", "every", "noted"), [(10, 10, True), (11, 10, False), (10, 0, False), (1, 1, True)])
def test_only_the_steps_that_are_asked_for_are_told(lines, log, step, every, noted, monkeypatch):
    monkeypatch.setattr("verl_mux.trainer.tracking._as_wandb", lambda tables: tables)
    tracking = Recorder("console", "wandb")
    log_tables(tracking, log, lines, step, every)
    assert tracking.calls == ([(step, ["wandb"], ["completion", "replicas", "slowest_requests"])] if noted else [])


def test_waits_are_told_with_the_job_that_had_the_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_mux.trainer.tracking._as_wandb", lambda tables: tables)
    make_mux_run(tmp_path, alone=1, together=2)
    events = tmp_path / "products" / "events"
    tracking = Recorder("wandb")
    log_tables(tracking, EventLog(events, role="trainer", job="products"), list(step_lines(events, 3)), step=3, every=1)
    table = tracking.data["lease_waits"]
    assert "fibonacci" in {row[table.columns.index("behind")] for row in table.rows}


def test_without_wandb_nothing_is_done(lines, log):
    tracking = Recorder("console", "tensorboard")
    log_tables(tracking, log, lines, step=1, every=1)
    assert tracking.calls == []


def test_a_tracker_that_fails_is_a_warning(lines, log, monkeypatch, caplog):
    monkeypatch.setattr("verl_mux.trainer.tracking._as_wandb", lambda tables: tables)
    with caplog.at_level(logging.WARNING):
        log_tables(Recorder("wandb", broken=True), log, lines, step=3, every=1)
    assert "step 3: its tables did not reach wandb: ConnectionError: no route to the tracker" in caplog.text


# ---------------------------------------------------------------- verl's own modes

METHODS = (
    *("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_compute_advantage", "_update_critic"),
    *("_update_actor", "_save_checkpoint", "_validate", "on_sample_end", "on_step_end", "step"),
)


@pytest.fixture
def trainer(tmp_path):
    """At step 2 of a job whose requests are logged."""
    make(tmp_path, seed=1, steps=2, requests=30, replicas=2)
    settings = WorkerSettings(job="a", uid="0a1b2c3d", events_dir=str(tmp_path / "a" / "events"), tables=2)
    rollout = {"custom": {"verl_mux": settings.to_dict()}}
    mux = {"profile": {"enable": True}}
    config = {"trainer": {"v1": {"trainer_mode": "sync"}}, "actor_rollout_ref": {"rollout": rollout}, "mux": mux}
    made = SimpleNamespace(config=OmegaConf.create(config), global_steps=2, logger=Recorder("console", "wandb"))
    made.replay_buffer = SimpleNamespace(sample=lambda *given: None)
    for name in METHODS:
        setattr(made, name, lambda *given: None)
    made._compute_metrics = lambda batch, metrics, *more: metrics.update(theirs=1.0)
    return made


@pytest.mark.parametrize(("step", "tables"), [(2, 1), (1, 0)])
def test_a_steps_metrics_get_ours_and_every_so_many_steps_wandb_its_tables(trainer, step, tables):
    log = instrument(trainer)
    trainer.global_steps, metrics = step, {}
    trainer._compute_metrics("batch", metrics)
    log.close()
    assert metrics["theirs"] == 1 and metrics["mux/requests"] == 30
    assert not [name for name in metrics if "tables" in name]
    assert [(at, backend) for at, backend, _ in trainer.logger.calls] == [(2, ["wandb"])] * tables
    for _, _, data in trainer.logger.calls:
        assert {*data} >= {"mux_tables/slowest_requests", "mux_tables/replicas", "mux_tables/completion_curve"}


def test_without_a_log_nothing_is_touched(trainer):
    trainer.config.actor_rollout_ref.rollout.custom.verl_mux.events_dir = None
    before = dict(vars(trainer))
    assert instrument(trainer) is None and vars(trainer) == before
