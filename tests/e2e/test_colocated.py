"""One pool: rollout and training of one job take turns on the same GPU, here with LoRA merged for the rollout."""

from __future__ import annotations

import pytest

from tests.e2e import tiny

pytestmark = pytest.mark.e2e


def test_a_colocated_job_validates_trains_and_is_checked_on_policy(assets, tmp_path):
    nodes = ["mux.nodes.rollout=[n0]", "mux.nodes.train=[n0]"]
    overrides = [*tiny.overrides(assets, 2, mode="mux_colocate"), "trainer.test_freq=2", "data.val_max_samples=4"]
    overrides += ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true"]
    process = tiny.start_job("job", overrides, tmp_path, None, *nodes)
    assert process.wait(600) == 0, (tmp_path / "job" / "job.log").read_text()[-3000:]
    events = tiny.events(tmp_path, "job")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2]
    phases = [e["extra"]["phase"] for e in events if e["event"] == "phase"]
    assert phases[-5:] == ["rollout", "train", "rollout", "train", "rollout"]
