"""What the config.json of known models says, and small composed verl configs around them."""

QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_32B = {**QWEN25_7B, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
              "num_key_value_heads": 8}  # fmt: skip
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
QWEN3_8B = {**QWEN3_32B, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


def verl(name="a", rollout=None, actor=None, model=None, **trainer):
    """A composed config, as far as the certificate reads it: 8 + 8 GPUs."""
    return {
        "mux": {"job": name, "nodes": {"rollout": ["r0"], "train": ["t0"]}},
        "data": {"train_batch_size": 256, "max_prompt_length": 1024, "max_response_length": 7168},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 8, "v1": {"trainer_mode": "mux_separate"}, **trainer},
        "actor_rollout_ref": {
            "model": {"path": "m", **(model or {})},
            "actor": {"strategy": "fsdp2", "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8192, **(actor or {})},
            "rollout": {
                "name": "sglang", "dtype": "bfloat16", "nnodes": 1, "n_gpus_per_node": 8, "gpu_memory_utilization": 0.8,
                **(rollout or {}),
            },
        },
    }  # fmt: skip
