"""`python -m tests.coordinator.model --schedules 10000 --seed 1`: explores the protocol; exits with 1 if anything was violated.

A seed is a schedule: `--seed N --schedules 1` plays one again and tells its story.
"""

import sys
from typing import Annotated

import typer
from rich.progress import track

from bench.protocol_model.schedules import PLANTED, explore


def main(
    schedules: Annotated[int, typer.Option(help="How many, one seed each.")] = 1000,
    seed: Annotated[int, typer.Option(help="The first.")] = 1,
    planted: Annotated[str, typer.Option(help=f"A fault that must be found: {', '.join(PLANTED)}.")] = "",
) -> None:
    found = explore(schedules, seed, planted, progress=lambda seeds: track(list(seeds), "schedules", transient=True))
    if schedules == 1:
        print("\n".join(found.story))
    print(f"{schedules} schedules from seed {seed}: {dict(found.violations) or 'no violation'}; faults {dict(found.faults)}")
    if found.again:
        print(f"again: python -m tests.coordinator.model --seed {found.again[0]} --schedules 1")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
