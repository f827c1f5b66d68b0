"""What verl's own trainer modes take from us: figures with each step's metrics, tables beside them."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from tests.profiling.made_engines import make
from verl_mux.trainer.stock_profile import instrument
from verl_mux.worker_settings import WorkerSettings

METHODS = (
    *("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_compute_advantage", "_update_critic"),
    *("_update_actor", "_save_checkpoint", "_validate", "on_sample_end", "on_step_end", "step"),
)


class Tracking:
    """verl's, with wandb among its trackers."""

    def __init__(self):
        self.logger, self.told = {"console": None, "wandb": None}, []

    def log(self, data, step, backend=None):
        self.told.append((step, backend, set(data)))


@pytest.fixture
def trainer(tmp_path):
    """At step 2 of a job whose requests are logged."""
    make(tmp_path, seed=1, steps=2, requests=30, replicas=2)
    settings = WorkerSettings(job="a", uid="0a1b2c3d", events_dir=str(tmp_path / "a" / "events"), tables=2)
    rollout = {"custom": {"verl_mux": settings.to_dict()}}
    mux = {"profile": {"enable": True}}
    config = {"trainer": {"v1": {"trainer_mode": "sync"}}, "actor_rollout_ref": {"rollout": rollout}, "mux": mux}
    made = SimpleNamespace(config=OmegaConf.create(config), global_steps=2, logger=Tracking())
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
    assert [(at, backend) for at, backend, _ in trainer.logger.told] == [(2, ["wandb"])] * tables
    for _, _, data in trainer.logger.told:
        assert data >= {"mux_tables/slowest_requests", "mux_tables/replicas", "mux_tables/completion_curve"}


def test_without_a_log_nothing_is_touched(trainer):
    trainer.config.actor_rollout_ref.rollout.custom.verl_mux.events_dir = None
    before = dict(vars(trainer))
    assert instrument(trainer) is None and vars(trainer) == before
