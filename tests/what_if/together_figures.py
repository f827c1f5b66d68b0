"""What-if of jobs that take turns, beside the same jobs through engines and a queue that share no code with it.

    python -m tests.what_if.together_figures FILE FILE    # rows {"id", "prompt", "epoch", "length"}, one file a job

The candidates of `ranking.py`, each for the one job, for the other, and for both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.what_if import taking_turns
from tests.what_if.ranking import BED, TRAINED_PART, candidates, lengths, plain, run
from tests.what_if.second_simulator import recording
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.what_if.recorded_run import recordings, stays_of
from verl_mux.what_if.together import Together, sharings
from verl_mux.what_if.what_if import WhatIf


def read(directory: Path) -> Together:
    """The jobs of a log that share nodes."""
    analysis = Analysis(read_files(directory, find_log_files(directory)))
    models = {it.job: WhatIf(it, stays_of(analysis, it.job)) for it in recordings(analysis)}
    (sharing,) = sharings(analysis, {name: model.recording for name, model in models.items()})
    return Together(sharing, models)


def main(files: Sequence[str]) -> None:
    """Prints a line a candidate: the change of the makespan as it is and as it is foretold."""
    rows = [one for file in files for one in lengths(Path(file)).values()]
    its = {f"job{number}": recording(one, seed=0) for number, one in enumerate(rows)}
    steps = min(int(TRAINED_PART * len(one.groups)) // BED.batch for one in its.values())
    alone = {name: run(plain(one, BED), BED, steps) for name, one in its.items()}
    held = taking_turns.take_turns(alone)
    with TemporaryDirectory() as folder:
        taking_turns.write(alone, held, Path(folder))
        together = read(Path(folder))
    tried = {name: list(candidates(model.recording.longest, model.recording.recurs)) for name, model in together.models.items()}
    errors, inside, base = [], 0, taking_turns.makespan(held)
    choices = [[name] for name in its] + [list(its)]
    for names, number in itertools.product(choices, range(len(tried[choices[0][0]]))):
        keys = {name: tried[name][number][0] for name in names}
        ran = alone | {name: run(tried[name][number][1](its[name], BED), BED, steps) for name in names}
        true, it = taking_turns.makespan(taking_turns.take_turns(ran)) / base - 1, together.predict(keys)
        errors.append(abs((1 + it.change) / (1 + true) - 1))
        inside += it.interval[0] <= true <= it.interval[1]
        print(f"{true:+.3f}  foretold {it.change:+.3f} ({it.interval[0]:+.3f} to {it.interval[1]:+.3f})  {keys}", flush=True)
    print(f"largest error {max(errors):.3f}; {inside} of {len(errors)} within their intervals")


if __name__ == "__main__":
    main(sys.argv[1:])
