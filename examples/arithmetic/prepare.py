"""Makes the example's models and problems: python examples/arithmetic/prepare.py --out DIR [--job NAME] [--seed N]."""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from jobs import JOBS, Job
from rich.console import Console
from rich.progress import track
from task import Problem, draw_distinct

from verl_mux.errors import UserError

TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 480, 32  # 60 steps of 8 prompts
STAMP = "stamp.json"
FORMAT = 3  # of what is written; raise it when the same arguments should give something else
console = Console(stderr=True)


def prepare(job: str, out: Path, seed: int) -> bool:
    """Writes `out/job/{model/,train.parquet,val.parquet}`; False when they are there already."""
    folder, wanted = out / job, _stamp(JOBS[job], seed)
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_problems(job, folder, seed)
    _write_model(job, folder / "model", seed)
    stamp.write_text(wanted)  # last: its presence says that all of it is there
    return True


def _stamp(job: Job, seed: int) -> str:
    return json.dumps({"format": FORMAT, "seed": seed, **asdict(job)}, indent=1)


def _write_problems(job: str, folder: Path, seed: int) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rng, taken = random.Random(f"{seed} problems {job}"), set()
    for split, size in (("train", TRAIN_PROBLEMS), ("val", VALIDATION_PROBLEMS)):
        problems = draw_distinct(JOBS[job].flavour, size, rng, taken)
        rows = [_row(job, split, index, problem) for index, problem in enumerate(problems)]
        Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")


def _row(job: str, split: str, index: int, problem: Problem) -> dict:
    """One problem in the form of verl's RLHFDataset."""
    return {
        "data_source": f"arithmetic/{job}",
        "prompt": [{"role": "user", "content": problem.text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "count": problem.count},
    }


def _write_model(job: str, folder: Path, seed: int) -> None:
    # Here and not above: a call that finds everything present should not wait for them.
    import torch
    from model import make_model, write_tokenizer
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar
    from warmup import warm_up

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = JOBS[job]
    model = make_model(spec.shape, tokenizer)
    losses = warm_up(model, tokenizer, spec.flavour, spec.warmup, random.Random(f"{seed} warmup {job}"))
    for _ in track(losses, f"warm-up {job}", spec.warmup.updates, console=console, disable=not console.is_terminal):
        pass
    model.save_pretrained(folder)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write into.")],
    job: Annotated[list[str] | None, typer.Option(help="Job to prepare, repeatable; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the problems, the weights and the warm-up.")] = 0,
) -> None:
    """Makes a folder for each job: a little Qwen2 with partial skill, and its problems."""
    names = job or list(JOBS)
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        raise UserError(f"--job {unknown[0]}: no such job; there are {', '.join(JOBS)}")
    for name in names:
        began = time.monotonic()
        made = prepare(name, out, seed)
        console.print(f"{name}: {f'made in {time.monotonic() - began:.0f} s' if made else 'present'} ({out / name})")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except UserError as error:
        console.print(f"error: {error}", highlight=False)
        raise SystemExit(2) from None
