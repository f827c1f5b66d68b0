"""The same study for several values of one of its settings, as figure 14 of the paper has it for the SLO and for the cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from research.simulate import Study, simulate
from research.workload.workload import parse_slo
from verl_mux.errors import UserError


class Sweep(msgspec.Struct, frozen=True):
    """setting: a key of SETTINGS. studies: by the value as given."""

    setting: str
    studies: dict[str, Study]


def _with_slo(study: Study, value: str) -> Study:
    return msgspec.structs.replace(study, slo=parse_slo(value))


def _with_cap(study: Study, value: str) -> Study:
    try:
        cap = int(value)
    except ValueError as error:
        raise UserError(f"--sweep cap: {value!r} is not a whole number of jobs") from error
    return msgspec.structs.replace(study, rules=msgspec.structs.replace(study.rules, cap=cap))


SETTINGS: dict[str, Callable[[Study, str], Study]] = {"slo": _with_slo, "cap": _with_cap}


def parse_sweep(spec: str, study: Study) -> Sweep:
    """`slo=1.1,1.5,2` or `cap=1,2,3,5`. Raises UserError, for a bad value too."""
    setting, _, given = spec.partition("=")
    values = [value.strip() for value in given.split(",") if value.strip()]
    if setting not in SETTINGS or not values:
        raise UserError(f"--sweep is {spec!r}; allowed: slo=NUMBER,NUMBER,... or cap=JOBS,JOBS,...")
    return Sweep(setting, {value: SETTINGS[setting](study, value) for value in values})


def run_sweep(sweep: Sweep, on_finish: Callable[[], None], processes: int) -> dict[str, object]:
    """What `--json` prints: the report of each study, with its value in front."""
    studies = sweep.studies.items()
    runs = [{sweep.setting: float(value), **simulate(study, on_finish, processes).report} for value, study in studies]
    return {"sweep": sweep.setting, "runs": runs}


def sweep_table(report: dict) -> str:
    """USD per hour and real SLO attainment of each policy, a line for each value."""
    setting, runs = report["sweep"], report["runs"]
    policies = runs[0]["policies"]
    lines = [_line([setting, *policies])]
    for run in runs:
        cells = (f"{found['usd_per_hour_mean']:.1f} {found['slo_attainment_real']:6.1%}" for found in run["policies"].values())
        lines.append(_line([f"{run[setting]:g}", *cells]))
    return "\n".join([*lines, f"USD/h and SLO real; {runs[0]['jobs']} jobs, {runs[0]['seeds']} seeds"])


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<6}" + "".join(f"{cell:>16}" for cell in cells[1:])
