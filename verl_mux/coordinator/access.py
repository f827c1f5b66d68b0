"""Who may say what: each message is held against the connection that it came by, before anybody acts on it."""

from __future__ import annotations

from typing import NamedTuple

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access.keys import AGENT, JOB, VIEWER


class Refusal(NamedTuple):
    """`kind`: what it is counted under; `reason`: for who sent it."""

    kind: str
    reason: str


def refusal(identity: bytes, role: str, message: m.AnyMessage) -> Refusal | None:
    """Why a message goes no further. Whether its client belongs to the job that it names, the state machine knows.

    All may ask for the status, a viewer nothing else. A job's messages take the key of a job, an agent's that of an agent, all
    others that of an operator.
    """
    if isinstance(message, m.StatusRequest):
        return None
    if role == VIEWER or (isinstance(message, m.FromJob), isinstance(message, m.AgentReport)) != (role == JOB, role == AGENT):
        return Refusal(f"not for a {role}", f"the key of a {role} was used, with which nobody may send {_name(message)}")
    if isinstance(message, m.FromJob) and message.client.encode() != identity:
        return Refusal("another's message", f"a {_name(message)} came by another connection than that of the client it names")
    if isinstance(message, m.AgentReport) and message.agent.encode() != identity:
        return Refusal("another's message", f"a {_name(message)} came by another connection than that of the agent it names")
    if isinstance(message, m.Register) and not _runs(message):
        where = f"pid {message.pid} of {message.host}"
        advice = "it has ended, or process ids are hidden there"
        return Refusal("no such process", f"job {message.job!r} registers as {where}, which does not run there; {advice}")
    return None


def _name(message: m.AnyMessage) -> str:
    return str(type(message).__struct_config__.tag)


def _runs(message: m.Register) -> bool:
    """As far as this host can see: a job whose driver is dead already would be cleared away, with all processes that it names."""
    return not members.is_here(message.driver) or members.is_alive(message.driver)
