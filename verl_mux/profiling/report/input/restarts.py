"""What belongs together among the files of a folder, where lines do not say. A second run of a job begins where a step comes
again after later steps. Folders of several hosts are one job where their steps go on side by side and no worker stands in two.
Runs in the report; called by run_log.py; reads the first and last lines of each file, and the files of one step.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from itertools import pairwise, permutations
from statistics import median

from verl_mux.profiling.plain.lines import LogFile, parse

ENDS = 2**13  # bytes that hold a file's last lines


SAME_STEPS = 0.8  # of the steps of the folder that has fewer
APART = 0.3  # of a step's usual length: how far the steps of two hosts may begin apart, besides what their clocks are

Steps = dict[int, list[tuple[float, float, LogFile]]]  # step -> when its files begin and end


def sorted_out(files: list[LogFile]) -> tuple[list[LogFile], dict[str, list[float]]]:
    """The files, those of several hosts under one job; and job -> when its second, third, ... run began, by the clock of the log
    (seconds since the epoch, local time read as UTC)."""
    steps: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for file in files:
        if file.role in ("rollout", "trainer", "server") and (span := _span(file)) is not None:
            steps[file.job][file.step].append((*span, file))
    names = dict[str, str]()
    for job, other in permutations(steps, 2):
        home = job.rpartition("/")[0]
        if job and other and other.rpartition("/")[0] == home and _side_by_side(steps[job], steps[other]):
            names[job] = home
    files = [replace(file, job=names.get(file.job, file.job)) for file in files]
    whole: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for job, by_step in steps.items():
        for step, found in by_step.items():
            whole[names.get(job, job)][step] += [item for item in found if item[2].role != "server"]
    return files, {job: began for job, by_step in whole.items() if (began := _begun_again(by_step))}


def _side_by_side(one: Steps, other: Steps) -> bool:
    """Are these the steps of two hosts of one job?"""
    common = sorted(one.keys() & other.keys())
    if len(common) < max(2, SAME_STEPS * min(len(one), len(other))) or _workers(one) & _workers(other):
        return False
    begins = [[min(span[0] for span in steps[step]) for step in common] for steps in (one, other)]
    apart = [a - b for a, b in zip(*begins, strict=True)]
    usual = median(b - a for a, b in pairwise(begins[0]))
    return max(apart) - min(apart) <= APART * usual


def _workers(steps: Steps) -> set[tuple[str, int]]:
    return {(file.role, file.worker) for found in steps.values() for _, _, file in found}


def _begun_again(whole: Steps) -> list[float]:
    """By one process's files, which have one clock."""
    streams: dict[tuple[str, int], Steps] = defaultdict(lambda: defaultdict(list))
    for step, found in whole.items():
        for item in found:
            streams[item[2].role, item[2].worker][step].append(item)
    return next(filter(None, (_comes_again(stream) for _, stream in sorted(streams.items()))), [])


def _comes_again(by_step: Steps) -> list[float]:
    spans = {step: (min(s[0] for s in found), max(s[1] for s in found)) for step, found in sorted(by_step.items())}
    for step, (first, last) in spans.items():
        # Steps of a run may overlap a little; here all of a later step lies inside an earlier one's time.
        later = [span for other, span in spans.items() if other > step and first < span[0] < last]
        if not later:
            continue
        times = sorted(time for _, _, file in by_step[step] for time in _times(file))
        gaps = [(a, b) for a, b in pairwise(times) if any(a <= begin < b for begin, _ in later)]
        return [b for a, b in gaps if b - a > max(gap[1] - gap[0] for gap in gaps) / 4]
    return []


def _span(file: LogFile) -> tuple[float, float] | None:
    try:
        with open(file.path, "rb") as raws:
            head = raws.readline(ENDS)
            raws.seek(max(file.size - ENDS, 0), os.SEEK_SET)
            tail = raws.read().splitlines()[-2:]
    except OSError:
        return None
    ends = [_time(line.timestamp) for raw in (head, *tail) if (line := parse(raw, file)) is not None and line.run is None]
    return (ends[0], max(ends)) if len(ends) > 1 else None


def _times(file: LogFile) -> list[float]:
    """When the lines' events began."""
    with open(file.path, "rb") as raws:
        lines = [line for raw in raws if (line := parse(raw, file)) is not None]
    return [_time(line.timestamp) - line.seconds for line in lines]


def _time(stamp: datetime) -> float:
    return (stamp.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
