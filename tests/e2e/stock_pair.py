"""verl's own trainer with our package and without, no mux key: the same numbers, step by step?

python -m tests.e2e.stock_pair FOLDER [STEPS]: a run each way of a job that decodes greedily in trainer mode `sync`;
JSON on stdout. "Without" is a Python of its own that has everything of this one but our package: of ours it can import only what
makes this machine's CPU a device of verl's, which is refused everything else (`cpu_bed.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.e2e.tiny import ENVIRONMENT, assets_in
from tests.e2e.tiny import overrides as tiny_overrides
from verl_mux.rollout.engine.sglang.sglang_record import RECORD

_REPOSITORY = Path(__file__).parents[2]
_LIMIT_S = 900
# Every prompt and answer has another reward, also of a model that has learnt nothing and answers all alike.
_REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return zlib.crc32(f"{ground_truth} {solution_str}".encode()) / 2**32
"""
# Figures of the clock and of the machine; all others are compared.
_OF_THE_MACHINE = re.compile(r"timing_s/|timing_per_token_ms/|perf/(mfu|throughput|time_per_step|max_memory|cpu_memory)")


def main() -> None:
    folder, steps = Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    (assets_in(folder) / "reward.py").write_text(_REWARD)
    pythons = {"with": sys.executable, "without": str(bare_python(folder / "bare"))}
    told = {kind: run(folder / kind, folder / "assets", python, steps) for kind, python in pythons.items()}
    figures = sum(map(len, told["with"]))
    print(json.dumps({"steps": steps, "figures": figures, **difference(told["with"], told["without"])}))


def difference(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict:
    """How many figures of all steps are equal, to the last bit, and the largest relative difference of the others."""
    worst, equal, name_of_worst = 0.0, 0, ""
    for step, (a, b) in enumerate(zip(one, other, strict=True), 1):
        assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
        for name, value in a.items():
            apart = 0.0 if value == b[name] else abs(value - b[name]) / max(abs(value), abs(b[name]))
            equal += apart == 0.0
            worst, name_of_worst = max((worst, name_of_worst), (apart, f"{name} of step {step}"))
    return {"equal": equal, "largest_relative_difference": worst, "of": name_of_worst if worst else ""}


def bare_python(folder: Path) -> Path:
    venv.create(folder, symlinks=True, with_pip=False)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "verl_mux" not in entry.name:
            (site / entry.name).symlink_to(entry)
    for package in ("verl_mux", "verl_mux_cpu"):
        (site / package).symlink_to(_REPOSITORY / package)
    (site / "cpu_bed.py").symlink_to(Path(__file__).with_name("cpu_bed.py"))
    about = site / "cpu_bed-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_bed\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[verl.plugins]\ncpu_bed = cpu_bed\n[sglang.srt.platforms]\ncpu_bed = cpu_bed:activate\n"
    )
    return folder / "bin" / "python"


def run(home: Path, assets: Path, python: str, steps: int) -> list[dict[str, float]]:
    """What verl tells of each step."""
    home.mkdir()
    told = home / "steps.jsonl"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {**ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(told), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "verl.trainer.main_ppo", *overrides(assets, home, steps)]
    with (home / "job.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=home, timeout=_LIMIT_S, check=True)
    lines = [json.loads(line)["data"] for line in told.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not _OF_THE_MACHINE.search(k)} for line in lines]


def overrides(assets: Path, home: Path, steps: int) -> list[str]:
    """No key of ours, and nothing that ours would fill in. One answer is a batch: verl orders several by random names, and sums
    depend on the order."""
    engine = {**RECORD.cpu_arguments, **RECORD.stock_cpu_arguments, "random_seed": 7, "max_running_requests": 1}
    parts, rollout = ("actor", "ref"), "actor_rollout_ref.rollout"
    return [
        *(key for key in tiny_overrides(assets, steps, mode="sync") if not key.startswith("mux.")),
        "trainer.device=cpu",
        "algorithm.norm_adv_by_std_in_grpo=false",  # of one sample a prompt: its advantage is its reward
        "data.train_batch_size=1",
        "data.seed=7",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.ref.strategy=fsdp2",
        *(f"actor_rollout_ref.{part}.use_torch_compile=False" for part in parts),
        *(f"actor_rollout_ref.{part}.fsdp_config.use_torch_compile=False" for part in parts),
        *(f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{kind}_dtype=fp32" for kind in ("param", "reduce", "buffer")),
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"{rollout}.nnodes=0",
        f"{rollout}.n=1",
        f"{rollout}.top_k=1",  # greedy
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=1",
        *(f"+{rollout}.engine_kwargs.sglang.{key}={value}" for key, value in engine.items()),
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={home}/checkpoints",
        "ray_kwargs.ray_init.num_gpus=1",
        f"hydra.run.dir={home}/hydra",
    ]


if __name__ == "__main__":
    main()
