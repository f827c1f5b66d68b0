"""The names of all events. docs/event_log.md is the table of record: what each means, the keys of its `extra`, and which process
logs it; the tests compare that table with these names and with what the code writes.

Names of the sglang multi-turn profiling logs are kept where the same thing is meant. Imported by every process that writes or
reads a log; pure.
"""

from __future__ import annotations

# One request (role "rollout", worker = agent loop worker; `extra.request_id` always).
REQUEST_START = "request_start"
PENDING = "pending_state_handling"
TURN_PREPROCESS = "turn_pre_process"
TURN_ENGINE_CALL = "turn_engine_call"
TURN_TOOL_PARSING = "turn_tool_parsing"
TOOL_EXECUTION = "tool_execution"
TOOL_RESPONSE = "tool_response_processing"
INTERACTION = "interaction_response"
TURN_POSTPROCESS = "turn_post_process"
TURN_END = "turn_end"
REWARD = "reward_calculation"
FINALIZATION = "finalization"
REQUEST_COMPLETE = "async_rollout_request_complete"
REQUEST_ABORTED = "aborted_request_with_cancelled_error"
REQUEST_PADDED = "aborted_request_with_cancelled_error_padding"
REQUEST_MIGRATED = "request_migrated"
REQUEST_REQUEUED = "request_requeued"
REQUEST_PARKED = "request_parked"
REQUEST_TEXT = "request_text"

# One rollout worker's step.
PREPROCESSING = "preprocessing_duration"
GENERATE = "async_generate_duration"
GENERATE_MONITORED = "async_rollout_with_monitoring_duration"
BARRIER_WAIT = "barrier_wait_duration"
TOTAL_STEP = "total_step_duration"

# The trainer's step (role "trainer", worker 0).
PHASE = "phase"
LEASE_WAIT = "lease_wait"
LEASE_FENCED = "lease_fenced"
SYNC = "sync"
SLEEP = "sleep"
WAKE = "wake"
GENERATE_PHASE = "generate"
SAMPLE_WAIT = "sample_wait"
DRAWN_AGAIN = "drawn_again"
SAMPLE_READY = "sample_ready"
MIGRATION = "tail_migration"
GROWTH = "rollout_growth"
OLD_LOG_PROB = "old_log_prob"
REF = "ref"
VALUES = "values"
ADV = "adv"
UPDATE_CRITIC = "update_critic"
UPDATE_ACTOR = "update_actor"
SAVE_CHECKPOINT = "save_checkpoint"
VALIDATE = "validate"
JOB_KEYS = "job_keys"
STEP = "step"

# One server replica (role "server", worker = replica).
ENGINE_QUEUE = "engine_queue"
ENGINE_GENERATE = "engine_generate"
ENGINE_DECODE = "engine_decode"
ENGINE_RETRACT = "engine_retract"
ENGINE_STALLED = "engine_stalled"

# The coordinator (job "coordinator", role "coordinator"; `extra.job` names the job); LEASE_WAIT too.
LEASE_HELD = "lease_held"
LEASE_RECLAIMED = "lease_reclaimed"
MEMORY = "memory"
HOST_MEMORY = "host_memory"
SEGMENT = "segment"
STEP_REPORT = "step_report"
PHASE_OVERDUE = "phase_overdue"
HOST_SEEN = "host_seen"
HOST_GONE = "host_gone"
NODE_FENCED = "node_fenced"
NODE_UNFENCED = "node_unfenced"
NODE_DRAINING = "node_draining"
POOLS_CHANGED = "pools_changed"
JOB_REGISTERED = "job_registered"
JOB_EXITED = "job_exited"
JOB_SILENT = "job_silent"
JOB_RESUMED = "job_resumed"
PLACED = "placed"
GROUP_PREDICTED = "group_predicted"
ESTIMATE_ERROR = "estimate_error"
SLO_AT_RISK = "slo_at_risk"
MOVE_ASKED = "move_asked"
JOB_MOVED = "job_moved"
MOVE_GIVEN_UP = "move_given_up"

# An agent (job "agent", role "agent"; `extra.host` names its host).
DEVICE_MEMORY = "device_memory"
AGENT_KILLED = "agent_killed"

# The log about itself.
LOG_OPEN = "log_open"
LOG_DROPPED = "log_dropped"
LOG_COST = "log_cost"

ABOUT_THE_LOG = (LOG_OPEN, LOG_DROPPED, LOG_COST)

# Of requests: events that other programs log and the report only counts, then all.
_OTHERS_OF_REQUESTS = {
    "tool_creation_pending_state", "interaction_start_pending_state", "main_loop", "turn_start", "engine_generate_setup",
    "engine_async_generate_actual", "tool_calling_state", "interacting_state",
}  # fmt: skip
OF_REQUESTS = _OTHERS_OF_REQUESTS | {
    REQUEST_START, PENDING, TURN_PREPROCESS, TURN_ENGINE_CALL, TURN_TOOL_PARSING, TOOL_EXECUTION, TOOL_RESPONSE, INTERACTION,
    TURN_POSTPROCESS, TURN_END, REWARD, FINALIZATION, REQUEST_COMPLETE, REQUEST_ABORTED, REQUEST_PADDED, REQUEST_MIGRATED,
    REQUEST_REQUEUED, REQUEST_PARKED, REQUEST_TEXT,
}  # fmt: skip
# Likewise of steps of a rollout worker.
_OTHERS_OF_STEPS = {
    "engine_async_generate", "sorting_duration", "barrier", "broadcast_duration", "data_extraction_duration", "padding_duration",
    "concatenation_duration", "batch_construction_duration", "cache_flush_duration", "final_construction_duration",
    "step_response_length_stats",
}  # fmt: skip
_CONSTANTS = {value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str)}
NAMES = _CONSTANTS | OF_REQUESTS | _OTHERS_OF_STEPS

# Other spellings of the same thing, as found in logs: read as if they were the name on the right.
ALIASES = {
    "request_end": REQUEST_COMPLETE,
    "request_complete": REQUEST_COMPLETE,
    "abort": REQUEST_ABORTED,
    "request_abort": REQUEST_ABORTED,
    "request_aborted": REQUEST_ABORTED,
    "engine_call": TURN_ENGINE_CALL,
    "tool_parsing": TURN_TOOL_PARSING,
    "tool": TOOL_EXECUTION,
    "reward": REWARD,
    "finalize": FINALIZATION,
    "queue": ENGINE_QUEUE,
}

# What a request's time is made of: event -> part. Parts do not overlap, except `engine_inner` (inside `engine`, used
# where `engine` is missing) and `tool_parse` (inside `postprocess`).
REQUEST_PARTS = {
    PENDING: "pending",
    TURN_PREPROCESS: "preprocess",
    TURN_ENGINE_CALL: "engine",
    "engine_async_generate_actual": "engine_inner",
    "engine_async_generate": "engine_inner",
    GENERATE: "engine_inner",
    TURN_TOOL_PARSING: "tool_parse",
    TOOL_EXECUTION: "tool",
    TOOL_RESPONSE: "tool_response",
    INTERACTION: "interaction",
    TURN_POSTPROCESS: "postprocess",
    REWARD: "reward",
    FINALIZATION: "finalize",
}

# Events that reach back over time in which their request could not run, in logs that have stays.
REACHING_BACK = (REQUEST_START, REQUEST_COMPLETE, REQUEST_ABORTED, REQUEST_PARKED)

# Which pool a phase's lease is paid for; `init` is no work.
POOL_OF_PHASE = {"rollout": "rollout", "sync": "rollout", "validate": "rollout", "train": "train"}

# Events that contain others of their own level; shares of a step leave them out.
ENCLOSING = {TOTAL_STEP, STEP, PHASE, GENERATE_MONITORED, "engine_async_generate", "barrier", LEASE_HELD}
