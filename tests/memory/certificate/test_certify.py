"""Certificates beside hand arithmetic, from composed configs of known models."""

import msgspec
import pytest

from tests.memory.certificate.models import QWEN3_30B_A3B, QWEN3_32B, QWEN25_7B, verl
from verl_mux.errors import UserError
from verl_mux.memory.certificate import device
from verl_mux.memory.certificate.certify import Capacity, certify
from verl_mux.memory.certificate.job import read_job

H20, H800, H200 = 96 * 10**9, 80 * 10**9, 141 * 10**9
# Of a sleeping engine (two GPUs or more) and its rollout worker: context, communicators, workspace; context.
ENGINE_KEEPS = 1_600_000_000 + 1_000_000_000 + 540_000_000 + 500_000_000
GRAPHS, PREFILL_GRAPHS = 600_000_000, 1_500_000_000
TRAINER_KEEPS = 1_600_000_000 + 1_000_000_000


def certificate(*jobs, rollout=H20, train=H800, host=None, **more):
    capacities = {("r0", "rollout"): Capacity(gpu=rollout, host=host), ("t0", "train"): Capacity(gpu=train, host=host)}
    return certify(jobs, capacities, **more)


def seven_billion(job="a", **rollout):
    return read_job(verl(job, {"tensor_model_parallel_size": 2, **rollout}), QWEN25_7B)


def test_qwen25_7b_on_two_gpus_each():
    found = certificate(seven_billion())
    rollout, train, sync = (found.gpus[n].phases[p] for n, p in (("r0", "rollout"), ("t0", "train"), ("r0", "sync")))
    layer = 2 * 3584 * 1792 + 2 * 3584 * 256 + 1792 + 512 + 3 * 3584 * 9472 + 2 * 3584
    weights = 2 * (28 * layer + 152064 * 3584 + 3584) + 32768 * 128 * 4  # bf16, and the rotary table
    table = 1025 * (32768 + 4) * 4
    free = H20 - ENGINE_KEEPS + 540_000_000  # before graphs and workspace are there
    assert rollout.bytes["weights"] == weights
    assert rollout.bytes["kv_cache"] == int(0.8 * free) - weights + table
    assert rollout.bytes["others"] == 0
    assert sync.bytes["weights"] == weights and "kv_cache" not in sync.bytes
    total, shard = 7_615_616_512, 7_615_616_512 // 8
    assert (train.bytes["weights"], train.bytes["gradients"], train.bytes["optimizer"]) == (4 * shard, 4 * shard, 8 * shard)
    assert train.bytes["gathered"] == (2 * 233_057_792 + 2 * 152064 * 3584) * 2
    assert found.per_token_kv_bytes == {"a": 2 * 28 * 4 * 128 * 2}
    assert found.parameters["a"].total == found.parameters["a"].active == total
    assert found.fits


def on_vllm(job="a", **rollout):
    return seven_billion(job, name="vllm", **rollout)


def test_vllm_gives_its_cache_what_its_share_of_the_whole_gpu_leaves_and_its_graphs_do_not_sleep():
    found = certificate(*(on_vllm(name) for name in "ab")).gpus["r0"].phases["rollout"].bytes
    assert sum(found[kind] for kind in ("weights", "kv_cache", "activations", "graphs")) == int(0.8 * H20)
    beside_it = certificate(seven_billion("a"), on_vllm("b")).gpus["r0"].phases["rollout"]
    assert (found["others"], beside_it.bytes["others"], beside_it.job) == (ENGINE_KEEPS + GRAPHS, ENGINE_KEEPS + GRAPHS, "a")


def test_vllm_takes_a_cache_of_given_bytes_and_prefills_what_verls_key_says():
    given = on_vllm(max_num_batched_tokens=4096, engine_kwargs={"vllm": {"kv_cache_memory_bytes": 10**9}})
    assert (device.kv_cache(given, H20), given.engine.prefill) == (10**9, 4096)
    assert device.activations(given) < device.activations(on_vllm())


def test_vllms_largest_share_fits_and_no_larger_one():
    best = certificate(*(on_vllm(name) for name in "abc")).largest_gpu_memory_utilization["a"]
    for share, fits in ((best, True), (round(best + 0.01, 2), False)):
        assert certificate(*(on_vllm(name, gpu_memory_utilization=share) for name in "abc")).fits is fits


def test_an_engine_without_a_record_is_refused_by_name():
    with pytest.raises(UserError, match="name is 'trtllm'; the certificate knows sglang, vllm"):
        seven_billion(name="trtllm")


def test_qwen3_32b_on_eight_gpus():
    job = read_job(verl("b", {"tensor_model_parallel_size": 8, "gpu_memory_utilization": 0.9}), QWEN3_32B)
    found = certificate(job, rollout=H200, train=H200)
    layer = 2 * 5120 * 1024 + 2 * 5120 * 128 + 2 * 128 + 3 * 5120 * 3200 + 2 * 5120
    weights = 2 * (64 * layer + 2 * 151936 // 8 * 5120 + 5120) + 40960 * 128 * 4
    assert found.gpus["r0"].phases["rollout"].bytes["weights"] == weights
    assert found.per_token_kv_bytes == {"b": 262_144}  # 2 x 64 layers x 8 heads x 128 x 2 bytes, all ranks together
    optimizer = 8 * 32_762_123_264 // 8
    assert found.gpus["t0"].phases["train"].bytes["optimizer"] == optimizer
    assert found.fits and found.largest_gpu_memory_utilization["b"] >= 0.9


def test_qwen3_30b_a3b_with_experts_of_their_own_on_each_gpu():
    job = read_job(verl("c", {"tensor_model_parallel_size": 8, "expert_parallel_size": 8}), QWEN3_30B_A3B)
    found = certificate(job)
    layer = (2 * 2048 * 512 + 2 * 2048 * 128 + 2 * 128) + 2 * 2048 + 2048 * 128 + 16 * 3 * 2048 * 768  # 16 of 128 experts
    weights = 2 * (48 * layer + 2 * 151936 // 8 * 2048 + 2048) + 40960 * 128 * 4
    assert found.gpus["r0"].phases["rollout"].bytes["weights"] == weights
    assert found.per_token_kv_bytes == {"c": 98_304}
    assert found.parameters["c"].active == 30_532_122_624 - 48 * 120 * 4_718_592


def test_what_the_sleeping_others_keep_stands_beside_every_phase():
    found = certificate(*(seven_billion(name) for name in "abc"))
    assert {phase: held.bytes["others"] for phase, held in found.gpus["r0"].phases.items()} == {
        "sync": 2 * ENGINE_KEEPS,
        "rollout": 2 * ENGINE_KEEPS,
    }
    assert found.gpus["t0"].phases["train"].bytes["others"] == 2 * TRAINER_KEEPS
    assert found.fits


@pytest.mark.parametrize(
    ("rollout", "budget", "own", "left"),
    [
        ({}, None, GRAPHS, 0),
        ({}, 96, GRAPHS, GRAPHS),
        ({"enforce_eager": True}, None, 0, 0),
        ({"engine_kwargs": {"sglang": {"disable_piecewise_cuda_graph": False}}}, None, GRAPHS, PREFILL_GRAPHS),
        ({"engine_kwargs": {"sglang": {"enforce_piecewise_cuda_graph": True}}}, None, GRAPHS, PREFILL_GRAPHS),
    ],
    ids=["graphs that sleep", "graphs that stay", "no graphs", "of prefills too", "of prefills, enforced"],
)  # fmt: skip
def test_graphs_stand_beside_phases_in_which_their_engine_is_awake_and_of_sleeping_engines_where_they_stay(
    rollout, budget, own, left
):
    def job(name):
        config = verl(name, {"tensor_model_parallel_size": 2, **rollout})
        config["mux"]["device"] = {"budget": budget}
        return read_job(config, QWEN25_7B)

    phases = certificate(*(job(name) for name in "abc")).gpus["r0"].phases
    for phase in ("rollout", "sync"):
        held = phases[phase].bytes
        assert (held.get("graphs", 0), held["others"]) == (own, 2 * (ENGINE_KEEPS + left))
        assert held.get("prefill_graphs", 0) == (PREFILL_GRAPHS if left == PREFILL_GRAPHS else 0)


def test_a_colocated_job_keeps_both_halves_and_each_phase_sees_the_other_one():
    def job(name):
        config = verl(name, {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.5}, v1={"trainer_mode": "mux_colocate"})
        config["mux"]["nodes"] = {"rollout": ["t0"], "train": ["t0"]}
        return read_job(config, QWEN25_7B)

    capacities = {("t0", "rollout"): Capacity(gpu=H200), ("t0", "train"): Capacity(gpu=H200)}
    phases = certify([job("a"), job("b")], capacities).gpus["t0"].phases
    assert set(phases) == {"sync", "rollout", "train"}
    assert phases["train"].bytes["context"] == 1_600_000_000 + 500_000_000 + 1_600_000_000
    assert phases["rollout"].bytes["others"] == ENGINE_KEEPS + TRAINER_KEEPS
    assert phases["rollout"].bytes["graphs"] == GRAPHS and "graphs" not in phases["train"].bytes


def test_too_large_a_utilization_does_not_fit_and_the_largest_one_does():
    jobs = [seven_billion(name, gpu_memory_utilization=0.97) for name in "abc"]
    found = certificate(*jobs)
    assert not found.fits and "r0: rollout of a needs" in found.why_not[0]
    best = found.largest_gpu_memory_utilization["a"]
    assert certificate(*(seven_billion(name, gpu_memory_utilization=best) for name in "abc")).fits
    assert not certificate(*(seven_billion(name, gpu_memory_utilization=round(best + 0.01, 2)) for name in "abc")).fits


def test_what_does_not_fit_by_little_is_told_in_figures_that_differ():
    needed = certificate(seven_billion()).gpus["t0"].phases["train"].total
    (why,) = certificate(seven_billion(), train=needed - 20_000_000).why_not
    assert why == f"t0: train of a needs {needed / 1e9:.2f} GB on a GPU of {needed / 1e9 - 0.02:.2f} GB"


def test_a_cache_without_room_for_one_response_does_not_fit():
    found = certificate(seven_billion(gpu_memory_utilization=0.083))
    assert not found.fits and "one longest response needs" in found.why_not[0]


def test_hosts_that_are_too_small_are_named():
    found = certificate(seven_billion("a"), seven_billion("b"), host=390 * 10**9)
    states = 2 * (4 + 8) * 7_615_616_512
    assert found.hosts["t0"].bytes["parameters"] + found.hosts["t0"].bytes["optimizer"] == states
    assert not found.fits and found.why_not == ["t0: the jobs need 407 GB of host memory, of 390 GB"]


def test_a_host_holds_what_was_synced():
    model = 2 * 7_615_616_512
    assert certificate(seven_billion()).hosts["r0"].bytes["synced"] == model
    kept = device.weights(seven_billion()) * seven_billion().engine.gpus_per_node
    assert certificate(seven_billion()).hosts["r0"].bytes["kept"] == kept
    config = verl()
    config["mux"] |= {"device": {"sleep_level": 2}}
    assert "kept" not in certificate(read_job(config, QWEN25_7B)).hosts["r0"].bytes


def test_the_shape_that_is_promised():
    held = msgspec.json.decode(msgspec.json.encode(certificate(seven_billion()).to_dict()))
    assert {"fits", "gpus", "hosts", "per_token_kv_bytes", "parameters"} <= set(held)
    phase = held["gpus"]["r0"]["phases"]["rollout"]
    assert phase["total"] == sum(phase["bytes"].values()) and held["gpus"]["r0"]["capacity"] == H20
    assert held["parameters"]["a"] == {"total": 7_615_616_512, "active": 7_615_616_512}


def test_what_a_run_measured_takes_the_place_of_the_formula_and_names_are_unique():
    phases = certificate(seven_billion(), measured={"a": {"rollout": {"weights": 7}}}).gpus["r0"].phases
    assert phases["rollout"].bytes["weights"] == 7 < phases["sync"].bytes["weights"]
    with pytest.raises(UserError, match="'a'"):
        certificate(seven_billion(), seven_billion())


def on_megatron(model, **parallel):
    return read_job(verl(actor={"strategy": "megatron", "megatron": parallel}), model)


def test_a_rank_of_megatrons_holds_its_part_and_the_optimizer_is_divided_over_all():
    found = certificate(on_megatron(QWEN25_7B, tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    layer = 2 * 3584 * 1792 + 2 * 3584 * 256 + 1792 + 512 + 3 * 3584 * 9472 + 2 * 3584
    part = 14 * layer + 152064 // 2 * 3584 + 3584
    held = found.gpus["t0"].phases["train"].bytes
    assert (held["weights"], held["gradients"], held["optimizer"]) == (2 * part, 4 * part, 12 * part // 2)
    host = found.hosts["t0"].bytes
    assert host["parameters"] == 8 * 2 * part and host["exported"] == 2 * 7_615_616_512


def test_experts_are_divided_over_ranks_of_their_own():
    held = certificate(on_megatron(QWEN3_30B_A3B, expert_model_parallel_size=8)).gpus["t0"].phases["train"].bytes
    layer = (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128) + 2 * 2048 + 2048 * 128 + 16 * 3 * 2048 * 768  # 16 of 128 experts
    assert held["weights"] == 2 * (48 * layer + 2 * 151936 * 2048 + 2048)
    assert held["optimizer"] == 12 * 30_532_122_624 // 8


def test_adapters_are_what_is_trained():
    job = read_job(verl(model={"lora_rank": 16, "lora": {"merge": True}}), QWEN25_7B)
    phase = certificate(job).gpus["t0"].phases["train"]
    assert phase.bytes["optimizer"] == -(-8 * job.model.lora(16) // 8)
    assert phase.bytes["weights"] > 4 * 7_615_616_512 // 8


def test_a_sync_brings_an_adapter_that_is_not_merged_alone_and_its_base_weights_sleep_on_the_host():
    merged, alone = (read_job(verl(model={"lora_rank": 16, "lora": {"merge": it}}), QWEN25_7B) for it in (True, False))
    adapter = alone.model.lora(16)
    on_host, before = (certificate(job).hosts["r0"].bytes for job in (alone, merged))
    assert on_host["synced"] == 2 * adapter and before["synced"] == 2 * 7_615_616_512
    assert certificate(alone).hosts["t0"].bytes["exported"] == 2 * adapter
    slots = device.weights(alone) - device.weights(merged)
    assert slots == 2 * 2 * -(-adapter // alone.engine.tensor)
    assert on_host["kept"] - before["kept"] == slots * alone.engine.gpus_per_node and before["kept"] > 0


@pytest.mark.parametrize(
    ("actor", "rollout", "words"),
    [
        ({"strategy": "veomni"}, {}, "strategy=veomni: the certificate knows fsdp, fsdp2 and megatron"),
        ({}, {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; a number between 0 and 1"),
        ({}, {"tensor_model_parallel_size": 3}, "8 rollout GPUs hold no replicas of 3"),
        ({}, {"dtype": "int7"}, "rollout.dtype is 'int7'; the certificate knows"),
    ],
)
def test_what_it_cannot_certify_is_refused_by_name(actor, rollout, words):
    with pytest.raises(UserError) as refused:
        read_job(verl(actor=actor, rollout=rollout), QWEN25_7B)
    assert words in str(refused.value)
