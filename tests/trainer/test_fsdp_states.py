"""The states of real FSDP2 modules leave for an arena: complete before FSDP looks, padded shards too, as many bytes as the
certificate says, and a step after it is that of a module that stayed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("verl")
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.memory.certificate.models import QWEN3_8B, QWEN3_30B_A3B, QWEN25_7B, QWEN25_32B, verl
from tests.sync.test_export import as_rank
from verl_mux.memory.arena import Arena, layout
from verl_mux.memory.certificate.certify import host_states
from verl_mux.memory.certificate.job import read_job
from verl_mux.trainer import fsdp_states, workers
from verl_mux.trainer.fsdp_states import local, of_model, of_optimizer
from verl_mux.trainer.workers import DeviceStates, host_copy

RANKS = 3
# Rows that three ranks do not divide, and fewer rows than ranks.
WIDTHS = (16, 7, 2)


class Late:
    """A device whose copies to the host run on until the host waits for them. Until then the host has NaN there."""

    def __init__(self) -> None:
        self._copy, self._under_way = torch.Tensor.copy_, []

    def copy(self, to, of, non_blocking=False):
        if not non_blocking:
            return self._copy(to, of)
        self._under_way.append((to, of.detach().clone()))
        return to.fill_(float("nan")) if to.is_floating_point() else to

    def arrive(self) -> None:
        while self._under_way:
            self._copy(*self._under_way.pop())

    def to(self, module, device, non_blocking=False):
        """As `Module.to`: each tensor is another one then."""
        return module._apply(partial(self._moved, late=device == "cpu"))

    def _moved(self, tensor, late):
        of = local(tensor.detach())
        data = torch.empty_like(of)
        self.copy(data, of, non_blocking=late)
        if of is tensor or not hasattr(tensor, "to_local"):
            return data
        _, context = tensor.__tensor_flatten__()
        return type(tensor).__tensor_unflatten__({"_local_tensor": data}, context, tensor.size(), tensor.stride())


class Trained:
    """A model over all ranks, some of whose shards have fewer rows, and its optimizer."""

    def __init__(self, mesh) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(inside, outside) for inside, outside in zip((8, *WIDTHS), WIDTHS, strict=False)]
        self.module = torch.nn.Sequential(*layers)
        self.module.register_buffer("table", torch.randn(5))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def step(self, zeroes: bool = True) -> float:
        loss = self.module(torch.ones(4, 8)).square().sum()
        loss.backward()
        self.optimizer.step()
        if zeroes:
            self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def bits(self) -> dict:
        """Of each state on this rank, and of what FSDP gathers of a parameter."""
        named = {name: local(param) for name, param in self.module.named_parameters()}
        named |= {f"{name}.grad": local(p.grad) for name, p in self.module.named_parameters() if p.grad is not None}
        named |= {"table": self.module.table}
        for number, kept in enumerate(self.optimizer.state.values()):
            named |= {f"{number}.{name}": local(value) for name, value in kept.items()}
        named |= {" ".join(it.name): it.part for it in of_model(self.module)}
        return {name: tensor.clone().reshape(-1).view(torch.uint8).tolist() for name, tensor in named.items()}

    @torch.no_grad()
    def places(self) -> dict:
        return {it.name: it.part.data_ptr() for it in (*of_model(self.module), *of_optimizer(self.optimizer))}


def _rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    late = Late()
    torch.Tensor.copy_ = lambda *given, **said: late.copy(*given, **said)
    torch.nn.Module.to = lambda *given, **said: late.to(*given, **said)
    torch._C._host_emptyCache = lambda: None
    device = SimpleNamespace(synchronize=late.arrive, empty_cache=lambda: None, memory_allocated=lambda: 0)
    workers.get_device_name = transformer_impl.get_device_name = lambda: "cuda"
    workers.get_torch_device = fsdp_states.get_torch_device = lambda: device
    fsdp_states.get_device_name = lambda: "cuda"
    transformer_impl.load_fsdp_model_to_gpu = lambda module: module.to("cuda")
    transformer_impl.load_fsdp_optimizer = _loaded
    mesh = init_device_mesh("cpu", (RANKS,))
    stays, leaves = Trained(mesh), Trained(mesh)
    engine = object.__new__(FSDPEngine)
    engine.engine_config = SimpleNamespace(strategy="fsdp2", forward_only=False, offload_policy=False)
    engine.module, engine.optimizer = leaves.module, leaves.optimizer
    fsdp_states.take_over()
    engine.to("cpu")  # as at the end of a set-up, and after a checkpoint was loaded
    assert leaves.bits() == stays.bits()
    states, places = DeviceStates("actor", engine), []
    states.wake()
    for step in range(4):
        assert stays.step(zeroes=step != 2) == leaves.step(zeroes=step != 2)
        before = leaves.bits()
        states.sleep()
        assert leaves.bits() == before == stays.bits()
        # What a sync reads.
        sent = {name: host_copy(local(value.detach())) for name, value in leaves.module.state_dict().items()}
        assert all(value.isfinite().all() for value in sent.values())
        places.append(leaves.places())
        states.sleep()  # what has left already stays where it is
        assert leaves.bits() == before
        states.wake()
        assert leaves.bits() == before
    assert places[0] == places[1] == places[3] and places[0].items() < places[2].items()
    dist.destroy_process_group()


def _loaded(optimizer, device):
    for kept in optimizer.state.values():
        kept.update({name: value.clone() for name, value in kept.items()})


def test_shards_of_fewer_rows_sleep_and_wake_bit_for_bit_while_copies_run_on(tmp_path):
    mp.start_processes(_rank, args=(str(tmp_path / "store"),), nprocs=RANKS, start_method="forkserver")


def test_a_frozen_model_that_fsdp_keeps_on_the_host_lies_in_the_arena_from_its_first_sleep_on(one_rank_mesh, monkeypatch):
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, memory_allocated=lambda: 0)
    for module in (workers, fsdp_states):
        monkeypatch.setattr(module, "get_device_name", lambda: "cuda")
        monkeypatch.setattr(module, "get_torch_device", lambda: device)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None)
    monkeypatch.setattr(fsdp_states, "_arena", held := Arena("training states"))
    frozen = Trained(one_rank_mesh)
    engine = SimpleNamespace(module=frozen.module, engine_config=SimpleNamespace(forward_only=True, offload_policy=False))
    engine.to = lambda *_, **__: None  # verl moves none
    states, before, seen = DeviceStates("ref", engine), frozen.bits(), []
    for _ in range(2):
        states.sleep()
        assert frozen.bits() == before
        seen.append(frozen.places())
    assert seen[0] == seen[1] and set(seen[0].values()) == {place.data_ptr() for place in held._places.values()}


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (QWEN25_7B, 91_387_398_144),
        (QWEN25_32B, 393_166_516_224),
        (QWEN3_8B, 98_288_824_320),
        (QWEN3_30B_A3B, 366_385_471_488),
    ],
    ids=["qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-30b-a3b"],
)
def test_eight_ranks_take_what_the_certificate_says(config, nbytes):
    from transformers import AutoConfig, AutoModelForCausalLM

    with as_rank(0, 8) as mesh, torch.no_grad():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        taken = 8 * layout(it.part.nbytes for it in (*of_model(model), *of_optimizer(optimizer)))[-1]
    said = host_states(read_job(verl(), config), "train")
    assert said["parameters"] + said["optimizer"] == nbytes == pytest.approx(taken, rel=0.01)
