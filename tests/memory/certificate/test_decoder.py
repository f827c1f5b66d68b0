"""Parameters and keys and values beside hand arithmetic and published counts."""

import pytest

from tests.memory.certificate.models import QWEN3_30B_A3B, QWEN3_32B, QWEN25_7B
from verl_mux.errors import UserError
from verl_mux.memory.certificate.decoder import decoder


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [  # the totals that their safetensors files name
        (QWEN25_7B, 7_615_616_512, 7_615_616_512),
        (QWEN3_32B, 32_762_123_264, 32_762_123_264),
        # 48 layers x 120 idle experts x 3 matrices of 2048 x 768 less
        (QWEN3_30B_A3B, 30_532_122_624, 30_532_122_624 - 48 * 120 * 3 * 2048 * 768),
    ],
)
def test_total_and_active_parameters(config, total, active):
    model = decoder(config)
    assert (model.total, model.active_total) == (total, active)


def test_eight_ranks_split_the_experts_and_repeat_router_and_keys():
    attention = 2 * 2048 * 512 + 2 * 2048 * 128 + 2 * 128
    layer = attention + 2 * 2048 + 2048 * 128 + 128 * 3 * 2048 * 768 // 8
    model = decoder(QWEN3_30B_A3B)
    assert model.on_gpu(8, 8, 1) == 48 * layer + 2 * 151936 // 8 * 2048 + 2048
    assert model.kv_values_on_gpu(8, 1) == 2 * 48 * 1 * 128  # four heads on eight ranks: each is there twice
    assert decoder(QWEN3_32B).kv_values_on_gpu(8, 1) == 2 * 64 * 1 * 128


def test_tied_embeddings_count_once():
    tied = {**QWEN25_7B, "tie_word_embeddings": True}
    assert decoder(QWEN25_7B).total - decoder(tied).total == 152064 * 3584


def test_a_small_vocabulary_is_padded_for_the_engine():
    small = decoder({**QWEN25_7B, "vocab_size": 288, "tie_word_embeddings": True})
    assert small.on_gpu(1, 1, 1) - small.total == (320 - 288) * 3584


def test_adapters_of_a_rank():
    h, kv, wide = 3584, 512, 18944
    assert decoder(QWEN25_7B).lora(16) == 16 * 28 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + wide))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: the certificate knows grouped-query attention only"),
        ({"hidden_size": None}, "hidden_size is None; a number of 1 or more is needed"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
    ],
)
def test_other_models_are_refused_by_name(change, words):
    with pytest.raises(UserError) as refused:
        decoder({**QWEN25_7B, **change})
    assert words in str(refused.value)
