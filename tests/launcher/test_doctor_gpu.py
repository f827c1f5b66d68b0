"""`verl-mux doctor --gpu`: of a machine on which all is wrong each fault is named, with what to do; of a good one nothing is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.memory.certificate.models import QWEN25_7B, verl
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import doctor, doctor_gpu
from verl_mux.launcher.doctor_gpu import Machine, gpu_checks
from verl_mux.platform.cuda_packages import FLASH_ATTENTION

H100 = "{}, NVIDIA H100 80GB HBM3, 81559, Default, Disabled, Enabled"
SCREEN = "| NVIDIA-SMI {0}.65.06        Driver Version: {0}.65.06      CUDA Version: {1}     |"
RAYLET = "/site/ray/raylet --min_worker_port={} --max_worker_port={} --dashboard_agent_command=python agent.py --listen-port={}"
CLIENT = "python -m ray.util.client.server --address=10.0.0.1:6379 --host=0.0.0.0 --port=10001 --mode=proxy"
LINKED = "\tlibcuda.so.1 => /usr/lib/libcuda.so.1 (0x7f)\n\tlibcudart.so.13 => {}\n"

GOOD = Machine(
    gpus="\n".join(map(H100.format, (0, 1))),
    screen=SCREEN.format(580, "13.0"),
    torch=(13, 0),
    flash=True,
    hub=False,
    engines=["sglang"],
    programs={"nvcc": "/cuda/bin/nvcc", "ninja": "/bin/ninja", "c++": "/bin/c++"},
    linker=LINKED.format("/site/nvidia/cu13/lib/libcudart.so.13 (0x7e)"),
    built=4,
    raylets=[RAYLET.format(0, 0, 20005), RAYLET.format(0, 0, 20055), CLIENT],
    memlock=-1,
    shm=64 * 10**9,
    memory=10**12,
)
FAULTY = Machine(
    gpus="0, NVIDIA H100 80GB HBM3, 81559, Exclusive_Process, Enabled, Disabled",
    screen=SCREEN.format(550, "12.4"),
    torch=(13, 0),
    flash=False,
    hub=False,
    engines=["sglang"],
    programs={"nvcc": None, "ninja": None, "c++": "/bin/c++"},
    linker=LINKED.format("not found"),
    built=0,
    raylets=[RAYLET.format(10002, 19999, 52365)] * 2,
    memlock=64 << 10,
    shm=64 << 20,
    memory=10**11,
)


def found(machine: Machine, needs=None, asked=(FLASH_ATTENTION,), **other):
    return {check.name: check for check in gpu_checks(dataclasses.replace(machine, **other), needs or {}, asked)}


FAULTS = {
    "driver": (False, "for CUDA up to 12.4; torch is built for CUDA 13.0", "a driver for CUDA 13"),
    "compute mode": (False, "GPU 0 is Exclusive_Process: two jobs cannot share it", "nvidia-smi -i 0 -c DEFAULT"),
    "MIG": (False, "GPU 0 is split", "nvidia-smi -i 0 -mig 0"),
    "persistence": (None, "off on GPU 0", "nvidia-smi -pm 1"),
    "attention": (False, "flash-attn 2, verl's default attention, is not here", "attn_implementation=sdpa"),
    "compiler": (False, "nvcc and ninja not found", "CUDA_HOME; pip install ninja"),
    "kernels": (None, "none of flashinfer's is compiled here", "sglang.bench_one_batch"),
    "libcudart": (False, "does not find libcudart.so.13 for torch_memory_saver", "install nvidia-cuda-runtime"),
    "Ray": (False, "hand out the same worker ports (10002-19999, 10002-19999)", "clusters.py RUN.yaml --print"),
    "memlock": (None, "0.00 GB may be locked", "ulimit -l unlimited"),
    "/dev/shm": (False, "0.1 GB: too little for NCCL and Ray", "--shm-size"),
    "host memory": (False, "t0 174 GB; this machine has 100 GB", "fewer jobs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_machine_where_all_is_wrong_is_named_with_what_to_do(name):
    check, (ok, said, advice) = found(FAULTY, {"r0": 59 * 10**9, "t0": 174 * 10**9})[name], FAULTS[name]
    assert check.ok is ok and said in check.found and advice in check.advice


def test_of_a_good_machine_nothing_is_wrong_and_its_gpus_are_in_the_coordinators_unit():
    checks = found(GOOD, {"t0": 10**11})
    assert {name for name, check in checks.items() if check.ok is not True or check.advice} == set()
    assert set(checks) == {"GPUs", *FAULTS}
    assert checks["GPUs"].found == "2 x NVIDIA H100 80GB HBM3, 85.5 GB each (device_bytes: 171041619968 for a node of all 2)"


@pytest.mark.parametrize(
    ("other", "name", "ok", "said"),
    [
        ({"gpus": ""}, "GPUs", False, "no NVIDIA GPU here (there is no nvidia-smi)"),
        ({"gpus": "NVIDIA-SMI has failed\n"}, "GPUs", False, "no NVIDIA GPU here (nvidia-smi says 'NVIDIA-SMI has failed')"),
        ({"gpus": "0, NVIDIA GB10, [N/A], Default, [N/A], [N/A]"}, "GPUs", True, "1 x NVIDIA GB10"),
        ({"gpus": H100.format(0).replace("Default", "Prohibited")}, "compute mode", False, "GPU 0 is Prohibited"),
        ({"screen": SCREEN.format(595, "14.1")}, "driver", True, "up to 14.1"),
        ({"screen": "| Driver Version: 595.1   CUDA UMD Version: 13.2 |"}, "driver", True, "up to 13.2"),
        ({"screen": "CUDA Version: N/A"}, "driver", None, "does not say"),
        ({"torch": None}, "driver", False, "built without CUDA"),
        ({"flash": False, "hub": True}, "attention", None, "fetches one from the hub"),
        ({"flash": False, "asked": ["sdpa"]}, "attention", True, "the jobs ask for sdpa"),
        ({"programs": {"nvcc": None, "ninja": "/n", "c++": "/c"}}, "compiler", None, "nvcc not found"),
        ({"linker": None}, "libcudart", False, "torch_memory_saver for torch's CUDA is not installed"),
        ({"linker": "\tlibcuda.so.1 => not found\n"}, "libcudart", False, "does not find libcuda.so.1"),
        ({"linker": "\tlibcuda.so.1 => not found\n", "gpus": ""}, "libcudart", True, "nothing is missing"),
        ({"raylets": []}, "Ray", True, "no Ray node on this host"),
        ({"raylets": [RAYLET.format(10002, 19999, 52365)]}, "Ray", None, "Ray's own worker ports 10002-19999"),
        ({"raylets": [RAYLET.format(10002, 12000, 0), RAYLET.format(12000, 14000, 0)]}, "Ray", False, "same worker ports"),
        ({"raylets": [RAYLET.format(10002, 11999, 0), RAYLET.format(12000, 14000, 0)]}, "Ray", True, "2 Ray nodes"),
        ({"raylets": [RAYLET.format(0, 0, 52365)] * 2}, "Ray", False, "two agents of Ray on this host want port 52365"),
        ({"raylets": [CLIENT] * 2}, "Ray", False, "two client servers of Ray on this host want port 10001"),
        ({"shm": 2 * 10**9}, "/dev/shm", None, "2.0 GB"),
        ({"needs": {"r0": 6 * 10**11, "t0": 6 * 10**11}}, "host memory", None, "r0 600 GB, t0 600 GB; this machine has 1000 GB"),
        ({"needs": {}}, "host memory", True, "this machine has 1000 GB; --job FILE"),
    ],
)
def test_each_check_reads_what_there_is(other, name, ok, said):
    check = found(GOOD, **other)[name]
    assert check.ok is ok and said in check.found
    assert (check.advice == "") is (ok is True)


def test_without_a_gpu_what_can_be_checked_is_and_without_sglang_its_parts_are_not():
    assert {"GPUs", *FAULTS} - {*found(GOOD, gpus="")} == {"driver", "compute mode", "MIG", "persistence"}
    assert {"GPUs", *FAULTS} - {*found(GOOD, engines=["vllm"])} == {"compiler", "kernels", "libcudart"}


def test_this_machine_is_read():
    """With its own nvidia-smi, /proc, packages and linker; whatever they say, each check has an answer."""
    machine = doctor_gpu.read_machine(["sglang"])
    assert (
        machine.memory > 0
        and {*machine.programs} == {"nvcc", "ninja", "c++"}
        and FAULTS.keys() - {*found(machine)} <= FAULTS.keys()
    )


class TestCommand:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        """What this machine is; by default the faulty one."""

        def made(machine):
            monkeypatch.setattr(doctor, "read_machine", lambda engines: machine)

        made(FAULTY)
        return made

    @pytest.fixture
    def job(self, tmp_path):
        """A composed config of a 7B job that asks for this attention."""

        def write(**model):
            (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
            (tmp_path / "job.json").write_text(json.dumps(verl(model={"path": str(tmp_path), **model})))
            return tmp_path / "job.json"

        return write

    def test_a_finding_is_a_line_and_the_exit_code_says_that_a_job_would_fail(self, capsys):
        with pytest.raises(
            Failure, match="first job on GPUs could not run here: driver, compute mode, MIG, attention, compiler, li"
        ):
            doctor.doctor(gpu=True)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + len(FAULTS)
        assert (
            lines[2] == "bad  compute mode: GPU 0 is Exclusive_Process: two jobs cannot share it; sudo nvidia-smi -i 0 -c DEFAULT"
        )

    def test_a_jobs_file_says_what_its_host_needs_and_which_attention(self, machine, job, capsys):
        machine(dataclasses.replace(GOOD, flash=False))
        doctor.doctor(gpu=True, job=job(override_config={"attn_implementation": "sdpa"}), as_json=True)
        printed = json.loads(capsys.readouterr().out)
        checks = {check["name"]: check for check in printed["checks"]}
        assert printed["ok"] and "the jobs ask for sdpa" in checks["attention"]["found"]
        assert checks["host memory"]["found"].startswith("r0 ") and ", t0 " in checks["host memory"]["found"]
        with pytest.raises(Failure, match="could not run here: attention$"):
            doctor.doctor(gpu=True, job=job())

    def test_it_goes_with_no_other_question(self):
        with pytest.raises(UserError, match="--gpu goes with --job FILE and --json alone"):
            doctor.doctor(gpu=True, command=["python"])
