"""`python -m tests.gpu.engine_process OPTIONS`: one engine that its parent moves, a JSON line for each word.

OPTIONS is JSON: `kind` "sglang" (a real engine on CUDA), "cpu" (one on the CPU, on a device with a budget) or "bed" (SGLang's own
sleep and wake under our hooks, over the CPU saver and the ledger of such a device); `folder`; `share` of the free memory that its
KV cache and weights take; `ranks` (tensor parallel); `gate`: wait at the launch gate until it is opened; `fault`: of the bed's,
what to do wrong on purpose.

In: {"do": "move", "verb": "sleep", ...} and so on. Out: `ANSWER {"error": ..., "value": ...}`; other lines are others'. An engine
of the bed is forked from a process that has imported everything (engines.py), and speaks over a Connection.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from verl_mux.memory.tags import KV_CACHE, WEIGHTS
from verl_mux.platform.charges import Charges
from verl_mux.rollout.engine import server_directory
from verl_mux.rollout.engine.server_directory import DIRECTORY_VARIABLE, mapped_bytes
from verl_mux.rollout.engine.sglang.plugin import ENGINE_MARK

ANSWER = "ANSWER "
PROMPT = [5, 9, 2, 11, 7, 3, 1, 8]
WIDTH = 512
PARAMETERS, REQUESTS = 20_000_000, 2
# So many that bytes a second mean something, and that two ranks share the heads.
CUDA_PARAMETERS = 480_000_000
# Of engines on the CPU. The ledger sees no activations, so they are kept few; and tensors outweigh what is charged.
CPU_TOKENS, CPU_PREFILL = 16_384, 64
# A wake there waits so long for what a process that ended still holds.
CPU_WAIT_S = 10.0
CPU_CHARGES = Charges(context=0.02, communicators=0.0, graphs=0.02, workspace=0.02, worker_context=0.02)


class Sglang:
    """Two requests at once, an untrained Qwen2."""

    def __init__(self, options: dict[str, Any]) -> None:
        from bench.memory_cycles import make_model
        from verl_mux.rollout.engine.sglang.sglang_record import RECORD

        self._ranks = options["ranks"]
        self._model = Path(options["folder"]) / ("model" if self._ranks == 1 else f"model-{self._ranks}")
        self._wait_s = CPU_WAIT_S if options["kind"] == "cpu" else 0.0
        if not self._model.exists():
            make_model(self._model, PARAMETERS if options["kind"] == "cpu" else CUDA_PARAMETERS, self._ranks)
        os.environ |= {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"}
        os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        on_device = self._on_cuda() if options["kind"] == "sglang" else self._on_cpu()
        import sglang

        self._engine = sglang.Engine(
            model_path=str(self._model), tp_size=options["ranks"], skip_tokenizer_init=True,
            mem_fraction_static=options["share"], max_running_requests=REQUESTS, context_length=256, enable_memory_saver=True,
            enable_weights_cpu_backup=False, log_level="error", skip_server_warmup=True, random_seed=0,
            disable_radix_cache=True,  # a prompt that is known goes another way, and rounds otherwise
            **RECORD.arguments, **on_device,
        )  # fmt: skip

    def _on_cuda(self) -> dict[str, Any]:
        """As verl starts it: SGLang's own choice on Hopper, FlashAttention 3, fails as it captures graphs."""
        return {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flashinfer"}

    def _on_cpu(self) -> dict[str, Any]:
        """With what it and the rollout worker beside it, whose part this process plays, would keep on a GPU."""
        from verl_mux.rollout.engine.sglang.sglang_record import RECORD
        from verl_mux_cpu import device_ledger

        device_ledger.charge(CPU_CHARGES.worker())
        os.environ[server_directory.CHARGES_VARIABLE] = json.dumps(CPU_CHARGES.engine(self._ranks, True))
        os.environ |= {"VERL_PLATFORM": "cpu", "SGLANG_USE_CPU_ENGINE": "1"}
        sizes = {"max_total_tokens": CPU_TOKENS, "chunked_prefill_size": CPU_PREFILL}
        return {**RECORD.cpu_arguments, "dtype": "float32", **sizes}

    def tokens(self, count: int) -> list[int]:
        """Greedy."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return self._engine.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]

    def move(self, verb: str, tags: list[str], level: int) -> None:
        from verl_mux.rollout.engine.sglang.manager import move

        self._engine.loop.run_until_complete(move(self._engine.tokenizer_manager, verb, tags, level, self._wait_s))

    def sync(self) -> None:
        from bench import memory_cycles

        memory_cycles.sync(self._engine, self._model, self._ranks)


class Bed:
    """A model of one matrix. What it keeps on its device besides its tags is charged as an engine's would be."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        from verl_mux.rollout.engine.sglang import scheduler_memory
        from verl_mux_cpu import device_ledger

        self._fault, self._share, self._ledger, self._rounds = options["fault"], options["share"], device_ledger, 0
        store = dist.FileStore(str(Path(options["folder"]) / f"store-{os.getpid()}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        os.environ[server_directory.CHARGES_VARIABLE] = json.dumps(Charges().engine(1, True))
        # SGLang's own question, which is one of a world of schedulers.
        scheduler_memory.measure = lambda runner: scheduler_memory.available_memory(_nobody, runner.device, runner.gpu_id)
        if self._fault == "measures too early":
            early = scheduler_memory.measure(types.SimpleNamespace(device="cpu", gpu_id=0))
            scheduler_memory.measure = lambda runner: early
        scheduler_memory.initialize(self._load, types.SimpleNamespace(device="cpu", gpu_id=0), 0.0)
        if self._fault == "keeps too much":
            device_ledger.charge({"forgotten": 2 * 10**9})

    def _load(self, _runner: Any, free_gib: float) -> None:
        import torch
        import torch.distributed as dist

        from verl_mux.rollout.engine.sglang.scheduler_memory import _report
        from verl_mux_cpu.cpu_engine import SavingAdapter

        adapter = SavingAdapter(_report)
        with adapter.region(WEIGHTS):
            self._model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        if self._fault == "books another's":
            _report(WEIGHTS, self._model.weight.nbytes + 10**9)
        with adapter.region(KV_CACHE):
            # Never touched, so the machine lends no page of it.
            self._cache = torch.empty(int(self._share * free_gib * 2**30) - self._model.weight.nbytes, dtype=torch.uint8)
        runner = types.SimpleNamespace(model=self._model)
        self._scheduler = types.SimpleNamespace(
            offload_tags=set(), memory_saver_adapter=adapter, tp_cpu_group=dist.group.WORLD, flush_cache=lambda: True,
            server_args=types.SimpleNamespace(enable_weights_cpu_backup=False), is_fully_idle=lambda: True,
            tp_worker=types.SimpleNamespace(model_runner=runner),
        )  # fmt: skip
        self.sync()

    def tokens(self, count: int) -> list[int]:
        import torch

        state, found = torch.linspace(-1, 1, WIDTH), []
        with torch.no_grad():
            for _ in range(count):
                state = torch.tanh(self._model(state))
                found.append(int(state.nan_to_num(-2.0).argmax()))
        return found

    def move(self, verb: str, tags: list[str], level: int) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
        from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin as Mixin

        from verl_mux.rollout.engine.sglang.scheduler_memory import REPORT, Ask, release, resume

        if verb == "sleep":
            asked: Any = ReleaseMemoryOccupationReqInput(tags=tags)
            hook, original = release, Mixin.release_memory_occupation
        else:
            asked = ResumeMemoryOccupationReqInput(tags=tags)
            hook, original = resume, Mixin.resume_memory_occupation
        setattr(asked, REPORT, Ask(level))
        told = getattr(hook(original, self._scheduler, asked), REPORT)
        if self._fault == "dies without room" and told.error and "no room" in told.error:
            os._exit(1)
        self._rounds += verb == "sleep"
        if self._fault == "grows":
            self._ledger.charge({"leaked": self._rounds * 10**8})
        if told.error:
            raise RuntimeError(told.error)

    def sync(self) -> None:
        import torch

        if self._fault == "syncs a part" and self._rounds:
            self._model.weight.data[: WIDTH // 2].copy_(_values()[: WIDTH // 2])
        elif self._fault == "syncs other values" and self._rounds:
            self._model.weight.data.copy_(_values().flip(0))
        else:
            with torch.no_grad():
                self._model.weight.copy_(_values())


def _values() -> Any:
    import torch

    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5


def _nobody(*_: Any, **__: Any) -> float:
    raise RuntimeError("the device of the bed has a budget")


class Lines:
    """What a Connection of multiprocessing does, over stdin and stdout, where engines print as well."""

    def recv(self) -> dict[str, Any]:
        if not (line := sys.stdin.readline()):
            raise EOFError
        return json.loads(line)

    def send(self, answer: dict[str, Any]) -> None:
        print(ANSWER + json.dumps(answer), flush=True)


def serve(options: dict[str, Any], environment: dict[str, str], parent: Any) -> None:
    """Until the parent is gone. `parent`: Lines, or a Connection."""
    os.environ |= {**environment, ENGINE_MARK: "1"}
    reports = Path(os.environ[DIRECTORY_VARIABLE])
    if not options["gate"]:
        server_directory.open_gate(reports)
    engine = (Bed if options["kind"] == "bed" else Sglang)(options)
    parent.send({"error": None, "value": mapped_bytes(reports)})
    while True:
        try:
            words = parent.recv()
        except EOFError:
            return
        do, error, value = words.pop("do"), None, None
        try:
            value = getattr(engine, do)(**words)
        except RuntimeError as raised:
            error = str(raised)
        parent.send({"error": error, "value": value})


if __name__ == "__main__":
    Lines().send({"pid": os.getpid()})
    serve(json.loads(sys.argv[1]), {}, Lines())
