"""A coordinator that is started with another configuration than the one its journal was written with. Pure."""

from __future__ import annotations

from pathlib import Path

from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.settings import Config, Pool
from verl_mux.coordinator.core.state import Machine
from verl_mux.errors import UserError


def carried_over(machine: Machine, config: Config, path: Path | None) -> Machine:
    """The machine under the new configuration: all of it where nodes were only added and times changed, else the token
    alone, if no job is left. Raises UserError when one is."""
    if _is_extended(machine.config, config):
        return Machine(config, machine.epoch, machine.state)
    left = [job.name for job in machine.state.jobs.values() if job.state is not JobState.ENDED]
    if left:
        raise UserError(
            f"journal {path} was written with another configuration and holds unfinished jobs ({', '.join(left)}): start with the"
            " old configuration, or name another journal. While jobs run, pools and nodes may be added and times changed, no more"
        )
    return Machine(config, machine.epoch, State(token=machine.state.token))


def _is_extended(before: Config, after: Config) -> bool:
    if (before.schedule, before.placement) != (after.schedule, after.placement):
        return False
    if before.placement is not None:  # what was placed is remembered by these pools
        return before.pools == after.pools
    return all(name in after.pools and _contains(after.pools[name], pool) for name, pool in before.pools.items())


def _contains(after: Pool, before: Pool) -> bool:
    return after.kind == before.kind and all(node in after.nodes for node in before.nodes)
