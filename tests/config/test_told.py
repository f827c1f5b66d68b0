"""What of a job's keys its event log says."""

from omegaconf import OmegaConf

from verl_mux.config.told import told


def test_what_steers_a_rollout_is_told_and_nothing_else():
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "mux_separate", "sampler": {"max_off_policy_threshold": 8}}},
            "actor_rollout_ref": {"model": {"path": "secret"}},
            "mux": {
                "rollout": {
                    "oversample": {"rate": 0.5, "max_cuts": 2},
                    "segments": {"segment_length": None},
                    "max_lag": 2,
                    "max_lag_strategy": "wait",
                    "tail": "none",
                }
            },
        }
    )
    assert set(told(config)) == {
        "trainer.v1.trainer_mode=mux_separate",
        "trainer.v1.sampler.max_off_policy_threshold=8",
        "mux.rollout.oversample.rate=0.5",
        "mux.rollout.oversample.max_cuts=2",
        "mux.rollout.max_lag=2",
        "mux.rollout.max_lag_strategy=wait",
        "mux.rollout.tail=none",
    }
