"""Every event name, with what it means: the table of record (docs/event_log.md is made from it).

Names of the sglang multi-turn profiling logs are kept where the same thing is meant (`origin` says "sglang"); ours
stand beside them ("mux"). A name may be logged by anyone; what the report knows of it is written here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

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
MIGRATION = "tail_migration"

# One rollout worker's step.
PREPROCESSING = "preprocessing_duration"
GENERATE = "async_generate_duration"
GENERATE_MONITORED = "async_rollout_with_monitoring_duration"
SORTING = "sorting_duration"
BARRIER_WAIT = "barrier_wait_duration"
BROADCAST = "broadcast_duration"
DATA_EXTRACTION = "data_extraction_duration"
PADDING = "padding_duration"
CONCATENATION = "concatenation_duration"
BATCH_CONSTRUCTION = "batch_construction_duration"
CACHE_FLUSH = "cache_flush_duration"
FINAL_CONSTRUCTION = "final_construction_duration"
TOTAL_STEP = "total_step_duration"
RESPONSE_LENGTHS = "step_response_length_stats"

# The trainer's step (role "trainer", worker 0).
PHASE = "phase"
LEASE_WAIT = "lease_wait"
SYNC = "sync"
SLEEP = "sleep"
WAKE = "wake"
MEMORY = "memory"
GENERATE_PHASE = "generate"
SAMPLE_WAIT = "sample_wait"
SAMPLE_READY = "sample_ready"
OLD_LOG_PROB = "old_log_prob"
REF = "ref"
VALUES = "values"
ADV = "adv"
UPDATE_CRITIC = "update_critic"
UPDATE_ACTOR = "update_actor"
SAVE_CHECKPOINT = "save_checkpoint"
VALIDATE = "validate"
STEP = "step"

# One server replica (role "server", worker = replica).
ENGINE_QUEUE = "engine_queue"
ENGINE_GENERATE = "engine_generate"
ENGINE_DECODE = "engine_decode"
ENGINE_RETRACT = "engine_retract"

# The coordinator (job "coordinator", role "coordinator"; `extra.job` says whose).
LEASE_HELD = "lease_held"
LEASE_RECLAIMED = "lease_reclaimed"
SEGMENT = "segment"
STEP_REPORT = "step_report"
JOB_REGISTERED = "job_registered"
JOB_EXITED = "job_exited"
JOB_SILENT = "job_silent"
JOB_RESUMED = "job_resumed"
PLACED = "placed"
GROUP_PREDICTED = "group_predicted"
ESTIMATE_ERROR = "estimate_error"
SLO_AT_RISK = "slo_at_risk"
RUN = "run"

# The log about itself.
LOG_OPEN = "log_open"
LOG_DROPPED = "log_dropped"
LOG_COST = "log_cost"
ABOUT_THE_LOG = (LOG_OPEN, LOG_DROPPED, LOG_COST)


@dataclass(frozen=True)
class Event:
    """One row of the table: who logs it, what it means, the keys of its `extra`, and whose name it is."""

    name: str
    level: str
    meaning: str
    extra: str = ""
    origin: str = "mux"


def _rows(level: str, origin: str, *rows: tuple) -> list[Event]:
    return [Event(row[0], level, row[1], row[2] if len(row) > 2 else "", origin) for row in rows]


TABLE: list[Event] = [
    *_rows(
        "request",
        "sglang",
        (REQUEST_START, "a request begins", "request_id, batch_data_id, prompt_tokens"),
        (PENDING, "set up before the first turn", "request_id"),
        ("tool_creation_pending_state", "tools are made, inside pending_state_handling", "request_id"),
        ("interaction_start_pending_state", "the interaction is started, inside pending_state_handling", "request_id"),
        ("main_loop", "all turns of a request", "request_id"),
        ("turn_start", "a turn begins", "request_id, turn"),
        (TURN_PREPROCESS, "from the turn's start to the engine call", "request_id, turn"),
        ("engine_generate_setup", "sampling parameters are made, inside the engine call", "request_id, turn"),
        (
            TURN_ENGINE_CALL,
            "one turn's generation, as the caller waits for it",
            "request_id, turn, replica, prompt_tokens, response_tokens, queue_sec, finish_reason",
        ),
        ("engine_async_generate_actual", "the engine's part of turn_engine_call", "request_id, turn"),
        (TURN_TOOL_PARSING, "tool calls are read from the response", "request_id, turn"),
        (TOOL_EXECUTION, "one tool call, or a turn's calls together", "request_id, turn, tool"),
        (TOOL_RESPONSE, "tool results become tokens", "request_id, turn"),
        ("tool_calling_state", "tool_execution and tool_response_processing together", "request_id, turn"),
        (INTERACTION, "the simulated user answers", "request_id, turn"),
        ("interacting_state", "interaction_response and what goes with it", "request_id, turn"),
        (TURN_POSTPROCESS, "from the engine's answer to the turn's end", "request_id, turn"),
        (TURN_END, "a turn is over; duration of all of it", "request_id, turn"),
        (REWARD, "the request's reward is computed", "request_id, score"),
        (FINALIZATION, "tokens, masks and padding of the finished request", "request_id"),
        (
            REQUEST_COMPLETE,
            "a request is over; duration from its start",
            "request_id, batch_data_id, finish_reason, turns, response_length, turn_timings",
        ),
        (REQUEST_ABORTED, "a request was cancelled; duration from its start", "request_id, reason, response_length"),
        (REQUEST_PADDED, "a cancelled request is replaced by padding", "request_id"),
    ),
    *_rows(
        "request",
        "mux",
        (REQUEST_MIGRATED, "a request moved to another replica", "request_id, source, target, tokens"),
        (REQUEST_REQUEUED, "a cut request was put back, to go on in a later step", "request_id, tokens"),
    ),
    *_rows(
        "step of a rollout worker",
        "sglang",
        (PREPROCESSING, "prompts become requests"),
        (GENERATE, "all requests of this worker"),
        ("engine_async_generate", "a single-turn batch inside the engine"),
        (GENERATE_MONITORED, "all requests, with over-sampling", "total_requests, target_completion, completed_count"),
        (SORTING, "results back in the order of the prompts"),
        (BARRIER_WAIT, "waiting for the other workers"),
        ("barrier", "the barrier's own cost"),
        (BROADCAST, "results go to the other ranks"),
        (DATA_EXTRACTION, "tokens and masks are collected from the requests"),
        (PADDING, "collected tokens are padded to one length"),
        (CONCATENATION, "prompts and responses are joined"),
        (BATCH_CONSTRUCTION, "the batch is built"),
        (CACHE_FLUSH, "the engine's prefix cache is dropped"),
        (FINAL_CONSTRUCTION, "the batch is handed over"),
        (RESPONSE_LENGTHS, "lengths of the step's responses", "min, max, mean"),
        (TOTAL_STEP, "the whole of the worker's step"),
    ),
    *_rows(
        "step of the trainer",
        "mux",
        (PHASE, "a phase under its lease", "phase (init|rollout|train|sync|validate), nodes, token"),
        (LEASE_WAIT, "waiting for the lease of a phase", "phase, nodes, holder"),
        (SYNC, "weights go from trainer to rollout", "bytes, version, ranks"),
        (SLEEP, "tagged memory is released", "tag, bytes, node, side (rollout|train)"),
        (WAKE, "tagged memory is mapped and filled again", "tag, bytes, node, side (rollout|train)"),
        (MEMORY, "bytes held on a node, by tag and place", "node, device_bytes, host_bytes, tags"),
        (GENERATE_PHASE, "from the rollout lease's engines awake to the last sample"),
        (SAMPLE_WAIT, "the trainer waits for samples", "samples"),
        (SAMPLE_READY, "from the last sample to asking for the training lease"),
        (MIGRATION, "the rollout's tail was gathered and nodes went back before its end", "nodes, requests, tokens, gain_sec"),
        (OLD_LOG_PROB, "log-probabilities under the policy that sampled"),
        (REF, "log-probabilities under the reference policy"),
        (VALUES, "values from the critic"),
        (ADV, "advantages"),
        (UPDATE_CRITIC, "the critic's update"),
        (UPDATE_ACTOR, "the policy's update"),
        (SAVE_CHECKPOINT, "a checkpoint is written"),
        (VALIDATE, "validation"),
        (STEP, "a training step is over; duration of all of it", "reward, response_length, metrics"),
    ),
    *_rows(
        "server replica",
        "mux",
        (ENGINE_QUEUE, "a request waits in the engine before its prefill", "request_id"),
        (ENGINE_GENERATE, "a request in the engine", "request_id, prompt_tokens, response_tokens"),
        (ENGINE_DECODE, "the engine's own counters", "running, queued, token_usage, tokens_per_sec"),
        (ENGINE_RETRACT, "the engine threw running requests out for want of KV cache", "requests, token_usage"),
    ),
    *_rows(
        "coordinator",
        "mux",
        (LEASE_WAIT, "a job waited for a lease", "job, phase, nodes, holder"),
        (LEASE_HELD, "a job held a lease; duration from grant to return", "job, phase, pool, nodes, token"),
        (LEASE_RECLAIMED, "a lease ended without its job's word", "job, phase, nodes, reason"),
        (SEGMENT, "a part of the run begins in which jobs take turns in one manner", "index, mode"),
        (STEP_REPORT, "a job told the figures of a step", "job, reward, response_length, tokens"),
        (JOB_REGISTERED, "a job came", "job, nodes, steps, pid"),
        (JOB_EXITED, "a job left", "job, reason"),
        (JOB_SILENT, "a job's heartbeats stopped", "job, pid, host"),
        (JOB_RESUMED, "its heartbeats came back", "job"),
        (PLACED, "a job got nodes of the coordinator's choice, or waits for them", "job, outcome, group, nodes, estimated"),
        (GROUP_PREDICTED, "the periods of a co-execution group", "group, nodes, source, periods, limits, usd_per_hour"),
        (ESTIMATE_ERROR, "a phase beside its estimate", "job, phase, source, estimated_s, observed_s, ratio"),
        (SLO_AT_RISK, "by corrected estimates a group no longer keeps everybody's SLO", "job, group"),
        (RUN, "a run of one or more jobs; duration of all of it", "jobs, pools"),
    ),
    *_rows(
        "the log itself",
        "mux",
        (LOG_OPEN, "a process opened its log", "host, pid, utc_offset_sec"),
        (LOG_DROPPED, "events lost because the queue was full", "count"),
        (
            LOG_COST,
            "what this process's log took since it last said so (VERL_MUX_LOG_COST=1)",
            "lines, caller_sec, writer_cpu_sec",
        ),
    ),
]
NAMES = {event.name for event in TABLE}
OF_REQUESTS = {event.name for event in TABLE if event.level == "request"}

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

# Which pool a phase's lease is paid for; `init` is no work.
POOL_OF_PHASE = {"rollout": "rollout", "sync": "rollout", "validate": "rollout", "train": "train"}

# Events that contain others of their own level; shares of a step leave them out.
ENCLOSING = {TOTAL_STEP, STEP, PHASE, GENERATE_MONITORED, "engine_async_generate", "barrier", RUN, LEASE_HELD}


def table() -> str:
    """The table as Markdown, for docs/event_log.md."""
    rows = [f"| `{event.name}` | {event.level} | {event.meaning} | {event.extra} | {event.origin} |" for event in TABLE]
    return "\n".join(["| event | logged for | meaning | `extra` | name by |", "| --- | --- | --- | --- | --- |", *rows])
