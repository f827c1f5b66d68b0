"""A real engine on the CPU, without Ray: sleep and wake at both levels and in parts, what stock SGLang ends at, and its bytes
beside the certificate's."""

import json

import pytest

from bench.memory_cycles import growth
from tests.memory.certificate.models import verl
from verl_mux.memory.certificate import device
from verl_mux.memory.certificate.job import read_job

pytestmark = pytest.mark.e2e
CYCLES = 15


@pytest.fixture(scope="module")
def report(forked):
    """What an engine of the smallest model report after so many cycles, the calls that end stock SGLang and some at random."""
    module = "bench.memory_cycles"
    done = forked("-m", module, "--cycles", str(CYCLES), "--parameters", "1", "--hostile", "30", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_sleep_gives_its_memory_back_and_the_same_greedy_tokens_follow_it(report):
    assert report["cycles"] == CYCLES and report["tokens_equal"] is True
    assert report["returned_fraction"] >= 0.95 and report["growth"] < 0.01
    assert report["stale_bytes"] == 0  # before a sync no weights move to the host


def test_growth_is_of_whole_rounds_after_the_first():
    assert growth([1, 1, 100, 103, 97, 102, 101, 103], 2) == pytest.approx(102 / 101.5 - 1)
    assert growth([1, 1, 100, 103], 2) is None


def test_the_calls_that_end_stock_sglang_leave_this_one_alive(report):
    assert (report["hostile"]["sequences"], report["hostile"]["tokens_equal"]) == (30, True)
    assert report["hostile"]["refused"] > 0


def test_what_a_sync_did_not_bring_is_named_as_the_engine_names_it_and_nothing_is_generated_with_it(report):
    layers = "model.layers.3.self_attn.qkv_proj.weight, model.layers.5.mlp.gate_up_proj.weight"
    assert report["hostile"]["lacking"] == f"after a sleep without a copy no sync has brought back {layers}, model.norm.weight"


def test_the_certificate_is_within_5_percent_of_what_the_saver_measured(report):
    model = {
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 1, "vocab_size": 1024, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    rollout = {"dtype": "float32", "max_num_seqs": 4, "engine_kwargs": {"sglang": {"max_total_tokens": 512}}}
    job = read_job(verl(rollout=rollout), model)
    assert device.weights(job) == pytest.approx(report["tags"]["weights"], rel=0.05)
    assert device.kv_cache(job, 10**12) == pytest.approx(report["tags"]["kv_cache"], rel=0.05)


def test_two_tensor_parallel_ranks_load_their_parts_of_one_region_and_sleep_together(forked):
    module = "bench.memory_cycles"
    done = forked("-m", module, "--cycles", "6", "--parameters", "1", "--hostile", "5", "--ranks", "2", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["tokens_equal"] is True and report["returned_fraction"] >= 0.9 and report["stale_bytes"] == 0
    assert report["hostile"]["tokens_equal"] is True and "no sync has brought back" in report["hostile"]["lacking"]
