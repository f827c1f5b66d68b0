"""Estimates before the first step of a job, and after some."""

import random

import msgspec
import pytest

from tests.placement.made_jobs import make_job
from verl_mux.errors import UserError
from verl_mux.placement.estimator import (
    GPU_KINDS,
    LEAST,
    RECENT,
    WINDOW,
    Observed,
    bounds,
    drifted,
    estimate_error,
    expected,
    find_kind,
    job_needs,
    job_spec,
    learnt,
    model_size,
    with_given,
)
from verl_mux.placement.model import Estimate

# config.json of Qwen2.5-3B/7B/14B/32B, as far as it matters.
QWEN = {
    "3B": (2048, 36, 11008, 151936, 16, 2, True),
    "7B": (3584, 28, 18944, 152064, 28, 4, False),
    "14B": (5120, 48, 13824, 152064, 40, 8, False),
    "32B": (5120, 64, 27648, 152064, 40, 8, False),
}
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


def model_config(name="7B"):
    return dict(zip((*SIZES, "tie_word_embeddings"), QWEN[name], strict=True))


def verl_config(**changes):
    """A resolved config of verl 0.9, cut down; `changes` by dotted key."""
    config = {
        "data": {"train_batch_size": 256, "max_prompt_length": 1024, "max_response_length": 8192},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
        "actor_rollout_ref": {
            "model": {"enable_gradient_checkpointing": True},
            "actor": {"ppo_epochs": 1, "use_kl_loss": False},
            "rollout": {"n": 1, "tensor_model_parallel_size": 1, "nnodes": 1, "n_gpus_per_node": 8, "dtype": "bfloat16"},
        },
    }
    for path, value in changes.items():
        *where, key = path.split(".")
        part = config
        for name in where:
            part = part[name]
        part[key] = value
    return config


def needs(model="7B", **changes):
    return job_needs(verl_config(**changes), model_config(model))


def found(needs, rollout="H20", train="H800"):
    return bounds(needs, GPU_KINDS[rollout], GPU_KINDS[train])


@pytest.mark.parametrize(("name", "billions"), [("3B", 3.09), ("7B", 7.62), ("14B", 14.77), ("32B", 32.76)])
def test_parameters_are_counted_from_the_model_config(name, billions):
    assert model_size(model_config(name)).params / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_config_of_a_vision_model_has_its_sizes_one_level_deeper():
    assert model_size({"text_config": model_config()}) == model_size(model_config())


# RollMux, arXiv 2512.11306v2: measured phases (table 3, figure 2), GPUs a side, and host memory per node (table 2).
@pytest.mark.parametrize(
    ("model", "nodes", "parallel", "rollout_s", "train_s", "rollout_gb", "train_gb"),
    [("7B", 1, 1, 137, 104, 275.7, 240.0), ("14B", 1, 1, 238, 197, 445.4, 456.1), ("32B", 2, 2, 268, 362, 490.3, 520.4 / 2)],
)
def test_the_papers_jobs_stay_within_their_bounds(model, nodes, parallel, rollout_s, train_s, rollout_gb, train_gb):
    rollout = "actor_rollout_ref.rollout"
    changes = {"trainer.nnodes": nodes, f"{rollout}.nnodes": nodes, f"{rollout}.tensor_model_parallel_size": parallel}
    bound = found(needs(model, **changes))
    assert rollout_s <= bound.rollout_s < 3 * rollout_s
    # With every response at its maximum there are seven times the mean's 1,206 tokens, beside the prompts' 1,024 at most.
    assert train_s * 3 <= bound.train_s < 7.5 * train_s
    assert rollout_gb <= bound.rollout_memory_gb < 1.3 * rollout_gb and train_gb <= bound.train_memory_gb < 2 * train_gb


# Qwen3-30B-A3B: 48 layers of 32 heads and 4 of keys, 128 experts 768 wide, 8 of them for a token.
MOE = {
    **dict(zip(SIZES, (2048, 48, 6144, 151936, 32, 4), strict=True)),
    **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
}
QWEN3_32B = {**dict(zip(SIZES, (5120, 64, 25600, 151936, 64, 8), strict=True)), "head_dim": 128, "tie_word_embeddings": False}
TP2 = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}


def test_a_mixture_of_experts_is_stored_whole_and_works_in_part():
    size = model_size(MOE)
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128  # queries and output, keys and values, the choice of experts
    expert, embedded = 3 * 2048 * 768, 2 * 151936 * 2048
    assert size.params == 48 * (layer + 128 * expert) + embedded and size.params / 1e9 == pytest.approx(30.5, rel=0.01)
    assert size.active_params == 48 * (layer + 8 * expert) + embedded and size.active_params / 1e9 == pytest.approx(
        3.35, rel=0.01
    )
    assert size.params_read(1) == pytest.approx(size.active_params) and size.params_read(1000) == pytest.approx(size.params)


@pytest.mark.parametrize(
    ("model", "rollout_gb", "train_gb"),
    [
        (MOE, 2.3 * 4 * 61.07, 24 * 30.53 + 8 * 14),  # 561 and 845
        (model_config("7B"), 4 * 15.23 + 8 * 14, 24 * 7.61 + 8 * 14),  # four copies and eight processes; 295
        (QWEN3_32B, 2.3 * 4 * 65.5, 24 * 32.76 + 8 * 14),  # 603 and 898
    ],
)
def test_host_memory_beside_hand_arithmetic(model, rollout_gb, train_gb):
    """Engines of two GPUs, so four copies on a node of eight."""
    bound = found(job_needs(verl_config(**TP2), model))
    assert bound.rollout_memory_gb == pytest.approx(max(rollout_gb, 2.3 * 4 * model_size(model).params * 2 / 1e9), rel=0.01)
    assert bound.train_memory_gb == pytest.approx(train_gb, rel=0.01)


@pytest.mark.parametrize(("model", "billions"), [(MOE, 3.35), (model_config("7B"), 7.61), (QWEN3_32B, 32.76)])
def test_training_beside_hand_arithmetic(model, billions):
    """256 samples of 9,216 tokens; five passes (old log-probs, forward, backward twice, recomputed) at 4.1 % of eight H800."""
    size = model_size(model)
    attention = 2 * size.num_hidden_layers * size.num_attention_heads * size.head_dim * 9216**2
    flops = 5 * 256 * (2 * billions * 1e9 * 9216 + attention)
    assert found(job_needs(verl_config(), model)).train_s - 2 == pytest.approx(flops / (8 * 989.5e12 * 0.041), rel=0.01)


def test_adapters_need_less_memory_and_time_than_all_parameters():
    whole, lora = found(needs()), found(needs(**{"actor_rollout_ref.model.lora_rank": 32}))
    adapters = 32 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert lora.train_memory_gb == pytest.approx((12 * 7.61e9 + 24 * adapters) / 1e9 + 112, rel=0.01)
    assert (lora.train_s - 2) / (whole.train_s - 2) == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"actor_rollout_ref.actor.use_kl_loss": True}, 6 / 5),
        ({"actor_rollout_ref.actor.ppo_epochs": 2}, 9 / 5),
        ({"algorithm.adv_estimator": "gae"}, 10 / 5),
        ({"actor_rollout_ref.model.enable_gradient_checkpointing": False}, 4 / 5),
        ({"trainer.nnodes": 2}, 1 / 2),
    ],
)
def test_training_costs_its_passes(change, factor):
    """Old log-probs one, each update three and one for recomputed activations, over all training GPUs."""
    fixed = GPU_KINDS["H800"].fixed_s
    assert (found(needs(**change)).train_s - fixed) / (found(needs()).train_s - fixed) == pytest.approx(factor)


def test_a_critic_needs_memory_of_its_own():
    more = found(needs(**{"algorithm.adv_estimator": "gae"})).train_memory_gb - found(needs()).train_memory_gb
    assert more == pytest.approx(24 * needs().model.params / 1e9)


def test_more_requests_than_the_device_holds_run_in_waves():
    few, many = needs("14B"), needs("14B", **{"actor_rollout_ref.rollout.n": 16})
    assert found(many).rollout_s > 10 * found(few).rollout_s


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.max_response_length", None), ("data.train_batch_size", 0), ("trainer.nnodes", "2"), ("trainer.nnodes", True)],
)
def test_a_config_without_a_limit_is_refused_by_its_key(key, value):
    with pytest.raises(UserError, match=f"{key} is {value!r}; a number of 1 or more"):
        needs(**{key: value})


def test_a_model_without_sizes_and_an_unknown_gpu_are_refused():
    with pytest.raises(UserError, match="hidden_size is None"):
        job_needs(verl_config(), {})
    with pytest.raises(UserError, match="'B9' is not known; allowed: H20, H800, H100, H200.*, mine"):
        find_kind("B9", {"mine": GPU_KINDS["H20"]})
    with pytest.raises(UserError, match="tb_per_s is 0"):
        with_given({"mine": {"tflops": 1, "tb_per_s": 0}})


def bounded():
    """A job with a rollout of at most 100 s and a training phase of at most 80 s."""
    bound = (Estimate(seconds=seconds, source="bound") for seconds in (100.0, 80.0))
    return msgspec.structs.replace(job_spec("a", needs(), found(needs())), **dict(zip(("rollout", "train"), bound, strict=True)))


def seen(count, rollout=40.0, train=30.0, between=1.0):
    return Observed(rollout=(rollout,) * count, train=(train,) * count, between=(between,) * count)


def test_before_its_first_step_a_job_is_placed_by_its_bounds():
    spec = job_spec("a", needs(), found(needs()), slo=1.5)
    assert spec.rollout.source == spec.train.source == "bound"
    assert spec.rollout.seconds == found(needs()).rollout_s
    assert (spec.slo, spec.sync_s) == (1.5, found(needs()).sync_s)
    assert learnt(spec, Observed()) == expected(spec, Observed()) == spec


def test_a_prediction_counts_with_medians_so_that_a_stalled_step_does_not_spoil_it():
    now = expected(bounded(), Observed(rollout=(30.0, 50.0, 900.0), train=(20.0, 30.0), between=(1.0, 3.0)))
    assert (now.rollout_hold_s, now.train.seconds, now.iteration_s) == (50.0, 25.0, 77.0)
    assert now.rollout.source == "median"


def test_only_the_last_observations_are_kept():
    observed = Observed()
    for second in range(WINDOW + 5):
        observed = observed.seen("rollout", float(second))
    assert observed.rollout[0] == 5.0 and len(observed.rollout) == WINDOW and observed.steps == 0


def test_errors_are_recorded_with_what_was_counted_on():
    errors = [estimate_error(bounded(), "rollout", 50.0), estimate_error(bounded(), "train", 160.0)]
    errors.append(estimate_error(learnt(bounded(), seen(3)), "rollout", 40.0))
    assert errors[0]["ratio"] == pytest.approx((100.0 + bounded().sync_s) / 50.0)  # a rollout holds the sync
    assert errors[1]["ratio"] == 0.5
    assert [error["source"] for error in errors] == ["bound", "bound", "mean"] and errors[2]["ratio"] == 1.0


def steps_seen(rollouts, trains, between=()):
    return Observed(rollout=tuple(rollouts), train=tuple(trains), between=tuple(between))


def test_a_few_steps_are_needed_and_the_time_between_phases_holds_no_node():
    job = make_job("a", 100, 100, sync_s=5)
    assert learnt(job, steps_seen([50.0] * (LEAST - 1), [40.0] * (LEAST - 1))) is job
    now = learnt(job, steps_seen([50.0] * LEAST, [40.0] * LEAST, [2.0]))
    assert (now.rollout_hold_s, now.train.seconds, now.iteration_s) == (50.0, 40.0, 92.0)


def test_only_the_last_steps_count_and_a_drift_does_not_look_like_noise():
    grown = [100.0 * (1 + step / 300) for step in range(300)]
    now = learnt(make_job("a", 100, 100), steps_seen(grown, grown))
    assert now.rollout.seconds == pytest.approx(sum(grown[-RECENT:]) / RECENT) and now.rollout.cv < 0.06


def test_noise_alone_is_no_drift_and_twice_the_length_is():
    rng = random.Random(1)
    noisy = [100 * rng.lognormvariate(0, 0.1) for _ in range(RECENT)]
    job = learnt(make_job("a", 100, 100), steps_seen(noisy, noisy))
    again = [100 * rng.lognormvariate(0, 0.1) for _ in range(RECENT)]
    assert not drifted(job, learnt(job, steps_seen(again, again)))
    assert drifted(job, learnt(job, steps_seen([2 * s for s in again], again)))


@pytest.mark.parametrize(("kind", "mib"), [("H20", 97_871), ("H800", 81_559), ("H100", 81_559), ("H200", 143_771)])
def test_a_kind_has_the_memory_that_nvidia_smi_counts(kind, mib):
    assert GPU_KINDS[kind].memory_gb == pytest.approx(mib * 2**20 / 1e9, abs=0.05)
