"""What our trainer modes make of a verl config, on verl's own."""

from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass

from verl_mux.config.completion import complete
from verl_mux.config.schema import MuxConfig, SyncConfig
from verl_mux.errors import UserError

CONFIGS = Path(verl.__file__).parent / "trainer" / "config"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def completed(*overrides, **sync):
    with initialize_config_dir(str(CONFIGS), version_base=None):
        given = ["actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=mux_separate", *overrides]
        config = compose("ppo_trainer", given)
    complete(config, MuxConfig(sync=SyncConfig(**sync)), cpu=True)
    return config.actor_rollout_ref.rollout.checkpoint_engine


@pytest.mark.parametrize("given", [(), (f"{BACKEND}=mux",)])
def test_the_sync_gets_the_keys(given):
    engine = completed(*given, timeout_s=7.0, interface="eth1")
    assert engine.backend == "mux"
    assert engine.engine_kwargs.mux == {"verify": True, "timeout_s": 7.0, "interface": "eth1", "transport": "sockets"}


def test_verl_makes_the_engine_of_them_on_both_sides():
    given = omega_conf_to_dataclass(completed(timeout_s=7.0))
    for side in ({"is_master": True}, {}):
        engine = CheckpointEngineRegistry.new(given.backend, bucket_size=1 << 20, **side, **given.engine_kwargs["mux"])
        assert engine._settings.timeout_s == 7.0


@pytest.mark.parametrize("backend", ["nccl", "mooncake", "delta_sharded"])
def test_a_backend_of_verls_is_refused_by_name_and_not_replaced(backend):
    with pytest.raises(UserError, match=f"checkpoint_engine.backend is '{backend}': trainer.v1.trainer_mode=mux_separate"):
        completed(f"{BACKEND}={backend}")
