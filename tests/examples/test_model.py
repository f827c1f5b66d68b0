"""The tokenizer and the model are what transformers and verl take for a Qwen2."""

from __future__ import annotations

import pytest
import torch
from model import Shape, make_model


def test_the_tokenizer_is_a_qwen2_one_that_verl_takes_and_a_byte_is_a_token(tokenizer):
    assert type(tokenizer).__name__.startswith("Qwen2Tokenizer")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "c:7+5=2\n#9"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    pytest.importorskip("verl.utils.tokenizer.continuous_token").QwenContinuousTokenBuilder(tokenizer)


@pytest.mark.parametrize("text", ["c 7+5", "user\n", "na\u00efve \u96ea", " \t\x00"])
def test_any_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_opens_the_assistant_s_turn(tokenizer):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "c 7+5"}], add_generation_prompt=True)
    text = "<|im_start|>user\nc 7+5<|im_end|>\n<|im_start|>assistant\n"
    assert prompt["input_ids"] == tokenizer(text)["input_ids"]
    assert len(prompt["input_ids"]) == 13


def test_a_model_reads_back_as_it_was_written(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = make_model(Shape(hidden=32, layers=1, heads=2, intermediate=64), tokenizer)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == "qwen2"
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
