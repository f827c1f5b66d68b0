"""What `verl-mux bench rollout` runs, and its figures from what the jobs wrote. Nothing here starts anything.

Called by rollout.py and tests.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

BASE = "sync"
PLAIN = "plain"
STEP = "timing_s/step"

# verl's own trainers run on the training GPUs alone, in which rollout and training take turns.
_STOCK = ["actor_rollout_ref.rollout.nnodes=0"]
# The barrier modes train the same number of samples in every step, on weights that are at most a few steps old.
MODES: dict[str, list[str]] = {
    BASE: [*_STOCK, "trainer.v1.trainer_mode=sync"],
    "colocate_async": [*_STOCK, "trainer.v1.trainer_mode=colocate_async"],
    PLAIN: [],
    "colocate": ["trainer.v1.trainer_mode=mux_colocate"],
    "oversample": ["mux.rollout.oversample.rate={rate}", "mux.rollout.oversample.max_cuts=8"],
    "segments": ["mux.rollout.segments.segment_length={segment}", "mux.rollout.segments.max_segments=4"],
}
# The prompts of few steps over and over, so that predictors that learn from earlier epochs have some; each has its own base
# beside it.
_EPOCHS = ["data.train_max_samples={epoch}"]
_ON_EPOCHS = {BASE: "sync_epochs", PLAIN: "plain_epochs", "colocate_async": "colocate_async_epochs"}
MODES |= {name: [*_EPOCHS, *MODES[mode]] for mode, name in _ON_EPOCHS.items()}
MODES["defer"] = [*_EPOCHS, "mux.rollout.tail=defer"]
DEFAULT_MODES = (BASE, "colocate_async", PLAIN, "oversample", "segments")
EPOCH_STEPS = 6
GROUPS = 8  # prompt groups of a step
SAMPLES = 4  # responses of a prompt group
JOB_LOG = "job.log"
RESPONSES = "responses"  # verl's dump of what each step trained, in a job's folder

_METRIC = re.compile(r" - ([A-Za-z_][^ :]*):(?:np\.\w+\()?(-?[0-9.]+(?:e[-+]?\d+)?|nan)")
_STEP = re.compile(r"\bstep:(\d+) - ")


class Run(NamedTuple):
    """One finished job. metrics: verl's console metrics by step. trained: by step how many responses to each prompt were
    trained; empty where the trainer dumped none."""

    mode: str
    seed: int
    metrics: dict[int, dict[str, float]]
    trained: dict[int, Counter[str]] = {}

    @property
    def on_epochs(self) -> bool:
        """Whether its data are the prompts of few steps over and over."""
        return _EPOCHS[0] in MODES[self.mode]

    @property
    def epochs(self) -> int:
        """Whole ones that it trained."""
        return len(self.metrics) // EPOCH_STEPS


def overrides(mode: str, rate: float, max_response_length: int) -> list[str]:
    """The keys that make a mode."""
    values = {"rate": f"{rate:g}", "segment": str(-(-max_response_length // 4)), "epoch": str(EPOCH_STEPS * GROUPS)}
    return [key.format(**values) for key in MODES[mode]]


def read_run(mode: str, seed: int, directory: Path) -> Run:
    """From the console log in a job's folder."""
    metrics: dict[int, dict[str, float]] = {}
    for line in (directory / JOB_LOG).read_text(errors="replace").splitlines():
        if found := _STEP.search(line):
            metrics[int(found[1])] = {name: float(value) for name, value in _METRIC.findall(line)}
    return Run(mode, seed, metrics, _trained(directory / RESPONSES))


def _trained(dumps: Path) -> dict[int, Counter[str]]:
    rows = {int(path.stem): map(json.loads, path.read_text().splitlines()) for path in dumps.glob("*.jsonl")}
    return {step: Counter(row["input"] for row in rows[step]) for step in sorted(rows)}


def figures(runs: Sequence[Run], warmup: int) -> dict[str, Any]:
    """{"modes": {mode: figures}}: medians over seeds of each seed's mean after `warmup` steps; ratios seed by seed.

    sync: verl's own trainer; plain: ours with nothing switched on; both on the data of the mode, so that `defer` stands beside
    `sync_epochs` and `plain_epochs`. reward_last: on the validation
    problems after the last step, which no mode selects by length; the mean of its last training steps where there was no
    validation. `_told_of_epochs` has the rest.
    """
    known = {(run.mode, run.seed): run for run in runs}
    out: dict[str, Any] = {}
    for mode in dict.fromkeys(run.mode for run in runs):
        mine = [run for run in runs if run.mode == mode]
        rewards = [_reward(run) for run in mine]
        pairs = {name: [(run, base) for run in mine if (base := known.get(_base(run, name)))] for name in (BASE, PLAIN)}
        ratios = {
            name: [_mean(run, STEP, warmup) / _mean(base, STEP, warmup) for run, base in found] for name, found in pairs.items()
        }
        out[mode] = {
            "seeds": [run.seed for run in mine],
            "step_s": median(_mean(run, STEP, warmup) for run in mine),
            "rollout_s": median(_mean(run, "timing_s/gen", warmup) for run in mine),
            **{f"time_ratio_to_{name}": median(found) if found else None for name, found in ratios.items()},
            **{f"time_ratio_to_{name}_by_seed": found for name, found in ratios.items()},
            "reward_last": mean(rewards),
            "reward_last_by_seed": rewards,
            "train_reward_last": mean(_last(run, "critic/score/mean") for run in mine),
            **_control(mine, warmup),
            **(_told_of_epochs(mine, pairs[PLAIN]) if mine[0].on_epochs else {}),
        }
    for name in (BASE, _ON_EPOCHS[BASE]):
        _compare_rewards(out, name)
    return {"modes": out}


def _base(run: Run, name: str) -> tuple[str, int]:
    return (_ON_EPOCHS[name] if run.on_epochs else name), run.seed


def _compare_rewards(modes: dict[str, Any], base: str) -> None:
    """With those on the same data."""
    if base not in modes:
        return
    rewards = modes[base]["reward_last_by_seed"]
    spread = max(rewards) - min(rewards)
    modes[base]["reward_spread"] = spread
    for mode, figures in modes.items():
        if (_EPOCHS[0] in MODES[mode]) == (_EPOCHS[0] in MODES[base]):
            figures["reward_minus_sync"] = figures["reward_last"] - mean(rewards)
            figures["reward_within_spread"] = figures["reward_minus_sync"] >= -spread


def _told_of_epochs(runs: Sequence[Run], pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """Of whole epochs, all seeds together.

    length_ratio_by_epoch: mean length of the responses trained over that of the base with nothing switched on (whose policy
    learns by itself, so from the second epoch on it is another one). prompts_lost: prompts that were not trained in an epoch;
    prompts_doubled: those that were trained more than once. Of a job of which no responses were dumped, None.
    """
    epochs = range(min(run.epochs for run in runs))
    ratios = [mean(_length(run, at) / _length(base, at) for run, base in pairs) for at in epochs] if pairs else None
    seen = [_of_epoch(run, at) for run in runs for at in range(run.epochs)] if all(run.trained for run in runs) else None
    return {
        "length_ratio_by_epoch": ratios,
        "prompts_lost": None if seen is None else sum(EPOCH_STEPS * GROUPS - len(prompts) for prompts in seen),
        "prompts_doubled": None if seen is None else sum(count > SAMPLES for prompts in seen for count in prompts.values()),
    }


def _steps_of(epoch: int) -> range:
    return range(epoch * EPOCH_STEPS + 1, (epoch + 1) * EPOCH_STEPS + 1)


def _length(run: Run, epoch: int) -> float:
    return mean(run.metrics[step]["response_length/mean"] for step in _steps_of(epoch))


def _of_epoch(run: Run, epoch: int) -> Counter[str]:
    return sum((run.trained[step] for step in _steps_of(epoch)), Counter())


def _control(runs: Sequence[Run], warmup: int) -> dict[str, float]:
    """Figures of mux/rollout/*, where the mode has them. Wasted tokens are counted over the whole run."""
    if not any("mux/rollout/generated_tokens" in metrics for run in runs for metrics in run.metrics.values()):
        return {"wasted_token_fraction": 0.0}
    wasted, generated = (
        sum(m.get(f"mux/rollout/{name}", 0.0) for run in runs for m in run.metrics.values())
        for name in ("wasted_tokens", "generated_tokens")
    )
    names = ("aborted_ratio", "length_bias", "off_policy_token_fraction", "mean_version_lag")
    means = {name: mean(_mean(run, f"mux/rollout/{name}", warmup) for run in runs) for name in names}
    return {"wasted_token_fraction": wasted / max(1.0, generated), **means}


def _mean(run: Run, name: str, warmup: int) -> float:
    values = [m[name] for step, m in run.metrics.items() if step > warmup and name in m]
    return mean(values) if values else 0.0


def _last(run: Run, name: str, count: int = 5) -> float:
    values = [run.metrics[step][name] for step in sorted(run.metrics) if name in run.metrics[step]]
    return mean(values[-count:]) if values else 0.0


def _reward(run: Run) -> float:
    last = run.metrics[max(run.metrics)] if run.metrics else {}
    validation = [value for name, value in last.items() if name.startswith("val-core/") and "/mean@" in name]
    return validation[0] if validation else _last(run, "critic/score/mean")
