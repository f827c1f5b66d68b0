"""The rule reward, alone and called by verl's reward loop."""

from __future__ import annotations

import asyncio

import pytest
from reward import compute_score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("b:1+2=3\na:2+3=5\n#5", 1.0),
        ("#5", 1.0),
        ("#5\n", 1.0),
        ("b:1+2=3\na:2+3=6\n#6", 0.0),
        ("b:1+2=3\na:2+3=5\n", 0.0),
        ("#5\na:2+3=5", 0.0),
        ("#55", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_digit_at_the_end_scores(solution, score):
    assert compute_score("arithmetic/fibonacci", solution, "5") == score


@pytest.mark.parametrize(("solution", "score"), [("a:2+3=5\n#5", 1.0), ("a:2+3=5\n#4", 0.0)])
def test_verl_s_reward_loop_gets_its_score(tokenizer, solution, score):
    pytest.importorskip("verl")
    import numpy
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    async def scored() -> dict:
        manager = NaiveRewardManager(OmegaConf.create({}), tokenizer, compute_score)
        return await manager.run_single(data)

    response = torch.tensor([tokenizer(solution + tokenizer.eos_token)["input_ids"]])
    objects = {"data_source": "arithmetic", "reward_model": {"ground_truth": "5"}, "extra_info": {}}
    arrays = {key: numpy.array([value], dtype=object) for key, value in objects.items()}
    data = DataProto.from_dict({"responses": response, "attention_mask": torch.ones_like(response)}, arrays)
    assert asyncio.run(scored())["reward_score"] == score
