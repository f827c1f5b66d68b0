"""The little Qwen2 of the arithmetic example: its tokenizer and its untrained weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from jobs import Shape
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Role names cost one token each; everything else is spelled in bytes, so that every digit is a token.
ROLES = ("system", "user", "assistant")
VOCABULARY_MULTIPLE = 16  # matrix kernels like it


def _merges(word: str) -> list[tuple[str, str]]:
    return [(word[:i], word[i]) for i in range(1, len(word))]


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level Qwen2 tokenizer: 256 bytes, the role names and the three ChatML tokens."""
    merges = [pair for role in ROLES for pair in _merges(role)]
    words = [*bytes_to_unicode().values(), *("".join(pair) for pair in merges)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    # Saved once more by the library itself, so that every reader finds the fast tokenizer.json too.
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def make_model(shape: Shape, tokenizer) -> Qwen2ForCausalLM:
    """An untrained Qwen2 of this shape over the tokenizer's words, fp32; torch's global generator is its seed."""
    words = -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    config = Qwen2Config(
        vocab_size=words,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model
