"""A coordinator that is started with another configuration than the one its journal was written with. Pure."""

from __future__ import annotations

from pathlib import Path

from verl_mux.coordinator.core.hosts import fences, pools
from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.state import Machine
from verl_mux.errors import UserError


def carried_over(machine: Machine, config: Config, path: Path | None) -> Machine:
    """The machine under the new configuration: all of it where that suits the jobs on record, else the token and what is known
    of hosts, if no job is left. Raises UserError when one is."""
    state = machine.state
    refusal = pools.refusal(state, machine.config, config)
    if refusal is not None:
        _refuse_unfinished(state, refusal, path)
        state = State(token=state.token, hosts=state.hosts)
    state.fenced = fences.fenced(state, config)
    return Machine(config, machine.epoch, state)


def _refuse_unfinished(state: State, refusal: str, path: Path | None) -> None:
    left = [job.name for job in state.jobs.values() if job.state is not JobState.ENDED]
    if left:
        raise UserError(
            f"journal {path} was written with another configuration and holds unfinished jobs ({', '.join(left)}): {refusal}."
            " Start with the old configuration, or name another journal"
        )
