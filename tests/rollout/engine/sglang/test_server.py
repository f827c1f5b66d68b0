"""The server between a job and its engine: what it asks of the engine, what it takes back, and when it says that it sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

from verl_mux.platform.choose import accelerator_present
from verl_mux_cpu import kernel_placeholders

if not accelerator_present():
    kernel_placeholders.install()

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_mux.config import completion
from verl_mux.config.schema import MuxConfig
from verl_mux.coordinator.bus.fence import Fenced
from verl_mux.memory.tags import SleepState
from verl_mux.platform.charges import DeviceSettings
from verl_mux.rollout.engine import engine_server, server_directory
from verl_mux.rollout.engine.sglang import manager, server
from verl_mux.rollout.engine.sglang.manager import EngineFailed, Refused
from verl_mux.rollout.engine.sglang.server import MuxSGLangHttpServer
from verl_mux.rollout.engine.sglang.sglang_record import RECORD
from verl_mux.worker_settings import KEY, WorkerSettings

SIZES = {"weights": 1000, "kv_cache": 500}


class Engine:
    """Answers what the server asks; `answers`: by (verb, first tag), what it raises instead. `stays`: bytes of a tag that do not
    leave."""

    def __init__(self):
        self.asked, self.answers, self.mapped, self.stays = [], {}, dict(SIZES), {}

    async def ask(self, manager, verb, tags, level, wait_s):
        self.asked.append((verb, tags, level))
        if error := self.answers.get((verb, tags[0])):
            raise error
        self.mapped |= {tag: SIZES[tag] if verb == "wake" else self.stays.get(tag, 0) for tag in tags if tag in SIZES}
        self.report()

    def report(self):
        server_directory.write_mapped(self.mapped, 1)


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setattr(manager, "move", made.ask)
    return made


@pytest.fixture
def make(engine, monkeypatch, tmp_path):
    """Makes a server on a device of this name, whose engine has started."""
    names = ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "NCCL_GRAPH_REGISTER", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK",
             "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH", "LD_LIBRARY_PATH", server_directory.DIRECTORY_VARIABLE,
             server_directory.CHARGES_VARIABLE, server.ENGINE_MARK, server.SEEDED_VARIABLE)  # fmt: skip
    for name in names:  # which come back as they were
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def stock(self, config, gpus):
        self.config, self.replica_world_size, self.base_gpu_id = config, gpus, 0
        self.replica_rank = self.node_rank = 0
        self.model_config = SimpleNamespace(lora_rank=0, lora={})
        self.nnodes, self.global_steps, self.tokenizer_manager = 1, None, None

    async def started(self):
        engine.report()

    monkeypatch.setattr(SGLangHttpServer, "__init__", stock)
    monkeypatch.setattr(SGLangHttpServer, "launch_server", started)
    monkeypatch.setattr(manager, "install", lambda *_: None)
    monkeypatch.setattr(manager, "eos_token_ids", lambda _: set())

    def made(device="cpu", gpus=1, eager=False, launched=True, **arguments) -> MuxSGLangHttpServer:
        for module in (engine_server, server):
            monkeypatch.setattr(module, "get_device_name", lambda: device)
        settings = WorkerSettings(rollout_nodes=("r0",), device=DeviceSettings())
        keys = {"enforce_eager": eager, "n_gpus_per_node": gpus, "engine_kwargs": {"sglang": arguments}}
        config = Config(custom={KEY: settings.to_dict()}, **keys)
        it = MuxSGLangHttpServer(config, gpus)
        if launched:
            asyncio.run(it.launch_server())
        return it

    return made


@dataclasses.dataclass
class Config:
    """Of verl's rollout config what a server reads."""

    custom: dict
    enforce_eager: bool
    n_gpus_per_node: int
    free_cache_engine: bool = True
    engine_kwargs: dict | None = None
    name: str = "sglang"
    nnodes: int = 1


def figures(moves):
    return {tag: (moved.nbytes, moved.mapped) for tag, moved in moves.items()}


def sleep(it, tags=None, level=2):
    node, moves = asyncio.run(it.sleep(tags, level))
    assert node == "r0"
    return figures(moves)


def wake(it, tags=None, token=1):
    return figures(asyncio.run(it.wake_up(tags, token))[1])


def test_each_tag_says_what_left_and_what_is_mapped_and_nothing_is_asked_twice(make, engine):
    it = make()
    assert sleep(it) == {"kv_cache": (500, 0), "weights": (1000, 0)}
    assert sleep(it) == {}
    assert wake(it, ["weights"]) == {"weights": (1000, 1000)} and wake(it, ["kv_cache"]) == {"kv_cache": (500, 500)}
    assert wake(it) == {}
    assert [(verb, tags) for verb, tags, _ in engine.asked] == [
        ("sleep", ["kv_cache"]), ("sleep", ["weights"]), ("wake", ["weights"]), ("wake", ["kv_cache"]),
    ]  # fmt: skip


def test_a_server_that_sleeps_wakes_under_a_newer_lease_alone(make, engine):
    it = make()
    wake(it, token=3)
    sleep(it)
    for token in (2, 3, None):
        with pytest.raises(Fenced):
            wake(it, token=token)
    assert it._states.state is SleepState.ASLEEP_2 and wake(it, token=4)


def test_base_weights_that_no_sync_brings_stay_on_the_host(make, engine):
    it = make()
    it.model_config.lora_rank = 8
    sleep(it, level=2)
    assert engine.asked[-1] == ("sleep", ["weights"], 1) and it._states.level == 1
    it.model_config.lora["merge"] = True
    it._states.state = SleepState.ACTIVE
    sleep(it, level=2)
    assert it._states.level == 2


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_of_which_a_part_is_refused_gives_the_other_part_back_at_the_level_at_which_it_slept(make, engine, level):
    it = make()
    sleep(it, level=level)
    engine.answers["wake", "kv_cache"] = Refused("no room to wake: kv_cache; held by math (pid 7) 3.00 GB")
    engine.asked.clear()
    with pytest.raises(Refused, match="held by math"):
        wake(it)
    assert engine.asked[-1] == ("sleep", ["weights"], level) and engine.mapped == {"weights": 0, "kv_cache": 0}
    assert it._states.level == level
    engine.answers.clear()
    assert set(wake(it)) == {"weights", "kv_cache"} and it._states.state is SleepState.ACTIVE


def test_weights_that_woke_by_themselves_stay_when_the_cache_finds_no_room(make, engine):
    it = make()
    sleep(it)
    wake(it, ["weights"])
    engine.answers["wake", "kv_cache"] = Refused("no room")
    with pytest.raises(Refused):
        wake(it, ["kv_cache"])
    assert it._states.state is SleepState.KV_RELEASED and engine.mapped == {"weights": 1000, "kv_cache": 0}


@pytest.mark.parametrize(("verb", "move"), [("sleep", sleep), ("wake", wake)])
def test_an_engine_of_which_nobody_knows_what_changed_is_not_asked_again(make, engine, verb, move):
    it = make()
    if verb == "wake":
        sleep(it)
    engine.answers[verb, "weights"] = EngineFailed("giving weights back failed")
    with pytest.raises(EngineFailed):
        move(it)
    assert it._states.state is SleepState.FAILED
    engine.asked.clear()
    for again in (sleep, wake):
        with pytest.raises(ValueError, match="engine is failed"):
            again(it, token=9) if again is wake else again(it)
    assert engine.asked == []


def test_a_tag_that_did_not_leave_but_for_edges_of_pages_is_no_sleep(make, engine):
    engine.stays["weights"] = 50
    assert sleep(make())["weights"] == (950, 50)
    engine.mapped = dict(SIZES)
    it = make()
    engine.stays["weights"] = 51
    with pytest.raises(RuntimeError, match=r"weights sleeps, but 0.00 of its 0.00 GB did not leave the device"):
        sleep(it)
    assert it._states.state is SleepState.KV_RELEASED  # no lease goes back for it


def test_a_server_that_starts_where_another_was_killed_finds_a_shut_gate_and_at_its_end_leaves_nothing(make):
    killed = make(launched=False)
    server_directory.open_gate(killed._directory)
    assert list((it := make(launched=False))._directory.iterdir()) == []
    asyncio.run(it.forget())
    assert not it._directory.parent.exists()


@pytest.mark.parametrize("tag", SIZES)
def test_an_engine_of_which_nothing_can_leave_does_not_start(make, engine, tag):
    engine.mapped.pop(tag)
    with pytest.raises(RuntimeError, match=f"nothing of this engine's {tag} can leave the device"):
        make()


def test_what_runs_is_aborted_before_the_engine_is_asked_to_sleep(make, engine):
    it = make()
    it._running = {"a"}

    def abort(rid):
        engine.asked.append(("abort", rid))
        it._running.discard(rid)

    it.tokenizer_manager = SimpleNamespace(abort_request=abort)
    sleep(it)
    assert engine.asked[:2] == [("abort", "a"), ("sleep", ["kv_cache"], 2)]


def test_requests_that_still_queue_leave_before_the_sleep_also_where_a_first_abort_came_too_early(make, monkeypatch):
    """SGLang's release ends the scheduler by an assertion where any is queued."""
    it, aborts = make(), []
    it._running = {str(number) for number in range(20)}

    def abort(rid):
        aborts.append(rid)
        if aborts.count(rid) > int(rid) % 2:  # an engine ignores an abort of what it has not received
            it._running.discard(rid)

    it.tokenizer_manager = SimpleNamespace(abort_request=abort)
    asked, left = manager.move, []
    monkeypatch.setattr(manager, "move", lambda *given: left.append(len(it._running)) or asked(*given))
    sleep(it)
    assert left == [0, 0] and len(aborts) == 30


@pytest.mark.parametrize(
    ("given", "sleep_too"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda", "eager": True}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_graphs_sleep_with_the_weights_where_there_are_any(make, engine, given, sleep_too):
    it = make(**given)
    assert os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("1" if sleep_too else None)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == ("0" if sleep_too else None)
    sleep(it)
    wake(it)
    weights = ["weights", "cuda_graph"] if sleep_too else ["weights"]
    assert [tags for _, tags, _ in engine.asked] == [["kv_cache"], weights, weights, ["kv_cache"]]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:64, expandable_segments: True,roundup_power2_divisions:[256:1,512:2]",
         "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2]"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)  # fmt: skip
def test_an_engine_has_no_expandable_segments_of_which_its_saver_frees_nothing(make, monkeypatch, given, kept):
    for name in engine_server._ALLOCATOR:
        monkeypatch.setenv(name, given)
    make(launched=False)
    assert {os.environ.get(name) for name in engine_server._ALLOCATOR} == {kept}


def test_what_a_user_says_of_nccls_graphs_stays(make, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    make("cuda")
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.parametrize(("device", "path"), [("cuda", "/pips/nvidia/cu13/lib"), ("cpu", None)])
def test_schedulers_on_a_gpu_start_with_the_runtime_of_torch_on_the_linkers_path(make, monkeypatch, device, path):
    monkeypatch.setattr(server, "with_torchs_runtime", lambda environment: {"LD_LIBRARY_PATH": "/pips/nvidia/cu13/lib"})
    make(device)
    assert os.environ.get("LD_LIBRARY_PATH") == path


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({"device": "cpu"}, {"context", "workspace", "graphs"}),
        ({"device": "cpu", "gpus": 2, "eager": True}, {"context", "workspace", "communicators", "graphs"}),
        ({"device": "cuda", "gpus": 2, "eager": True}, {"context", "workspace", "communicators"}),
        (
            {"device": "cuda", "eager": True, "disable_piecewise_cuda_graph": False},
            {"context", "workspace", "prefill_graphs"},
        ),
    ],
)
def test_the_engines_processes_find_in_the_environment_what_they_need(make, given, kinds):
    it = make(**given, launched=False)
    assert set(json.loads(os.environ[server_directory.CHARGES_VARIABLE])) == kinds
    assert os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert os.environ[server_directory.DIRECTORY_VARIABLE] == str(it._directory) and it._directory.is_dir()
    assert (os.environ[server.ENGINE_MARK], os.environ[server.SEEDED_VARIABLE]) == ("1", "0")
    several_on_cpu = given["device"] == "cpu" and given.get("gpus", 1) > 1
    assert ("SGLANG_CPU_OMP_THREADS_BIND" in os.environ) is several_on_cpu


# ---------------------------------------------------------------- what verl's server hands SGLang


class Launch(Exception):
    """SGLang's own arguments; its processes would start now."""


@pytest.mark.parametrize(
    ("given", "prefill_graphs_off", "attention"),
    [
        # FA3's graphs cannot be captured in SGLang 0.5.12, so verl takes another attention.
        ({}, True, "flashinfer"),
        ({"disable_piecewise_cuda_graph": False, "attention_backend": "triton"}, False, "triton"),
        ({"enforce_piecewise_cuda_graph": True}, False, "flashinfer"),
    ],
)
def test_sglang_gets_no_graphs_of_prefills_and_verls_attention_unless_the_user_says_so(
    tmp_path, monkeypatch, given, prefill_graphs_off, attention
):
    def launch(server_args, **_):
        raise Launch(server_args)

    monkeypatch.setattr("sglang.srt.entrypoints.http_server.Engine._launch_subprocesses", launch)
    monkeypatch.setattr("sglang.srt.entrypoints.engine._set_envs_and_config", lambda *_: None)
    monkeypatch.setenv("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", ["actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=mux_separate"])
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.engine_kwargs = {"sglang": {"device": "cuda", **given}}
    completion.complete(config, MuxConfig(), cpu=False)
    it = object.__new__(SGLangHttpServer)
    it.config, it.rollout_mode = omega_conf_to_dataclass(rollout), RolloutMode.STANDALONE
    it.model_config = SimpleNamespace(local_path=str(tmp_path), trust_remote_code=False, lora_rank=0, lora={})
    it.node_rank = it.base_gpu_id = 0
    it.nnodes, it._disaggregation_role = 1, "null"
    with pytest.raises(Launch) as launched:
        asyncio.run(it.launch_server())
    found = launched.value.args[0]
    assert (found.disable_piecewise_cuda_graph, found.attention_backend) == (prefill_graphs_off, attention)
    assert RECORD.prefill_graphs(given) is not prefill_graphs_off
