"""Why a documented event or key does not occur in a run: what such a run has not, and what goes with it."""

from __future__ import annotations

from verl_mux.profiling.eventlog import events

# What a run has not -> events and `event.key`s that only come with it. Where one of them occurs the run has it after all, and
# the others' absence is not explained.
LACKING: dict[str, tuple[str, ...]] = {
    "its agent loop calls no tool": (events.TOOL_EXECUTION,),
    "no request is cut off or given up": (events.REQUEST_ABORTED,),
    "nothing that was cut off goes on": (events.REQUEST_REQUEUED,),
    "no request had to wait before it could generate": (events.REQUEST_PARKED,),
    "no prompt group is given up": (events.REQUEST_PADDED,),
    "no rollout control": (events.GENERATE_MONITORED,),
    "nothing is migrated": (events.REQUEST_MIGRATED, events.MIGRATION),
    "all nodes of its rollouts are its own": (events.GROWTH,),
    "no texts are asked for": (events.REQUEST_TEXT,),
    "not one of verl's own streaming modes": (events.SAMPLE_WAIT,),
    "no reference policy": (events.REF,),
    "no critic": (events.VALUES, events.UPDATE_CRITIC),
    "no validation": (events.VALIDATE,),
    "no checkpoint is due": (events.SAVE_CHECKPOINT,),
    "no coordinator fell silent": (events.LEASE_FENCED,),
    "SGLang's scheduler ends with an exception when it prefills a thrown out request without a GPU": (events.ENGINE_RETRACT,),
    "no engine stood still again": (events.ENGINE_STALLED,),
    "no speculative decoding": tuple(f"{events.ENGINE_GENERATE}.{key}" for key in ("drafted_tokens", "accepted_tokens")),
    "no order of dispatch": (f"{events.ENGINE_QUEUE}.priority",),
    "no log's queue was full": (events.LOG_DROPPED,),
    "its cost is not asked for": (events.LOG_COST,),
    "no schedule": (events.SEGMENT,),
    "no filler": (f"{events.LEASE_HELD}.filler", f"{events.LEASE_HELD}.leaving_s", f"{events.JOB_REGISTERED}.filler"),
    "every lease was given back": (events.LEASE_RECLAIMED,),
    "no phase took far longer than it does": (events.PHASE_OVERDUE,),
    "no heartbeats stopped": (events.JOB_SILENT, events.JOB_RESUMED),
    "no agent looks at a host": (events.HOST_SEEN, events.DEVICE_MEMORY),
    "no node says how much memory its host has": (f"{events.HOST_MEMORY}.capacity",),
    "no agent fell silent": (events.HOST_GONE,),
    "no process outlived its job": (events.AGENT_KILLED,),
    "no node had to be kept from jobs": (events.NODE_FENCED, events.NODE_UNFENCED),
    "nobody took a node out": (events.NODE_DRAINING,),
    "pools stayed as they were": (events.POOLS_CHANGED,),
    "jobs name their nodes": (events.PLACED, events.GROUP_PREDICTED, events.ESTIMATE_ERROR),
    "no promise was in danger": (events.SLO_AT_RISK,),
    "no job was moved": (events.MOVE_ASKED, events.JOB_MOVED),
    "every move was made": (events.MOVE_GIVEN_UP,),
}
# Role that nobody had -> what the run has not.
WITHOUT = {"coordinator": "no coordinator", "agent": "no agent looks at a host"}
