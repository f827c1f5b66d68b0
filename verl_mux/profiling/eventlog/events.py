"""Every event name and its meaning: the table of record, printed in docs/event_log.md.

Names of the sglang multi-turn profiling logs are kept where the same thing is meant (`origin` says "sglang"); ours are "mux".
Imported by every process that writes or reads a log; pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
MIGRATION = "tail_migration"
GROWTH = "rollout_growth"

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
LEASE_FENCED = "lease_fenced"
SYNC = "sync"
SLEEP = "sleep"
WAKE = "wake"
MEMORY = "memory"
HOST_MEMORY = "host_memory"
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
JOB_KEYS = "job_keys"
STEP = "step"

# One server replica (role "server", worker = replica).
ENGINE_QUEUE = "engine_queue"
ENGINE_GENERATE = "engine_generate"
ENGINE_DECODE = "engine_decode"
ENGINE_RETRACT = "engine_retract"
ENGINE_STALLED = "engine_stalled"

# The coordinator (job "coordinator", role "coordinator"; `extra.job` names the job).
LEASE_HELD = "lease_held"
LEASE_RECLAIMED = "lease_reclaimed"
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


@dataclass(frozen=True)
class Event:
    """One row of the table: what it means, the keys of its `extra`, which process logs it, and where its name comes from.

    written: False where verl_mux does not log the event but reads it in other logs. unwritten: keys of `extra` that verl_mux
    reads but does not write.
    """

    name: str
    meaning: str
    extra: str = ""
    unwritten: str = ""
    written: bool = True
    level: str = ""
    origin: str = ""


def _rows(level: str, origin: str, *events: Event) -> list[Event]:
    return [replace(event, level=level, origin=origin) for event in events]


def _foreign(name: str, meaning: str, extra: str = "") -> Event:
    """One that verl_mux does not log."""
    return Event(name, meaning, extra, written=False)


TABLE: list[Event] = [
    *_rows(
        "request",
        "sglang",
        Event(REQUEST_START, "a request begins", "request_id, batch_data_id, session, validate"),
        _foreign(PENDING, "set up before the first turn", "request_id"),
        _foreign("tool_creation_pending_state", "tools are made, inside pending_state_handling", "request_id"),
        _foreign("interaction_start_pending_state", "the interaction is started, inside pending_state_handling", "request_id"),
        _foreign("main_loop", "all turns of a request", "request_id"),
        _foreign("turn_start", "a turn begins", "request_id, turn"),
        Event(
            TURN_PREPROCESS,
            "from the request's start, or the end of its previous part, to the turn's engine call",
            "request_id, turn",
        ),
        _foreign("engine_generate_setup", "sampling parameters are made, inside the engine call", "request_id, turn"),
        Event(
            TURN_ENGINE_CALL,
            "one stay in an engine, as the caller waits for it: a turn's generation, or a part of it where it was cut off",
            "request_id, turn, stay, prompt_tokens, response_tokens, finish_reason, replica, node, queue_sec, held_sec, version",
            "generated_tokens",
        ),
        _foreign("engine_async_generate_actual", "the engine's part of turn_engine_call", "request_id, turn"),
        _foreign(TURN_TOOL_PARSING, "tool calls are read from the response", "request_id, turn"),
        Event(TOOL_EXECUTION, "one tool call, or a turn's calls together", "request_id, turn, tool"),
        _foreign(TOOL_RESPONSE, "tool results become tokens", "request_id, turn"),
        _foreign("tool_calling_state", "tool_execution and tool_response_processing together", "request_id, turn"),
        _foreign(INTERACTION, "the simulated user answers", "request_id, turn"),
        _foreign("interacting_state", "interaction_response and what goes with it", "request_id, turn"),
        _foreign(TURN_POSTPROCESS, "from the engine's answer to the turn's end", "request_id, turn"),
        _foreign(TURN_END, "a turn is over; duration of all of it", "request_id, turn"),
        Event(REWARD, "the request's reward is computed", "request_id, turn, score"),
        Event(FINALIZATION, "tokens, masks and padding of the finished request", "request_id, turn"),
        Event(
            REQUEST_COMPLETE,
            "a request is over; duration from its start, with all the time in which it was parked",
            "request_id, batch_data_id, session, validate, finish_reason, turns, stays, response_length, parked_sec, score",
            "turn_timings, actual_response_tokens",
        ),
        Event(
            REQUEST_ABORTED,
            "a request was cut off (reason `cut off`, an instant: it may go on), or given up (`cancelled`, `failed`); duration, "
            "where it has one, from its start",
            "request_id, reason, response_length",
        ),
        Event(REQUEST_PADDED, "a cancelled request is replaced by padding", "request_id"),
    ),
    *_rows(
        "request",
        "mux",
        Event(REQUEST_MIGRATED, "a request moved to another replica", "request_id, source, target, tokens"),
        Event(REQUEST_REQUEUED, "a request that was cut off goes on, with the tokens it has", "request_id, tokens"),
        Event(
            REQUEST_PARKED,
            "a request could not generate: `not launched` yet, `cut off`, its round's `budget` used up, or begun again after it "
            "had `failed`; logged in the step in which it goes on",
            "request_id, turn, reason",
        ),
        Event(
            REQUEST_TEXT,
            "a request's prompt and response, tools' results included; for a share of them (`mux.profile.texts`)",
            "request_id, prompt, response, left_out (characters)",
        ),
    ),
    *_rows(
        "step of a rollout worker",
        "sglang",
        _foreign(PREPROCESSING, "prompts become requests"),
        _foreign(GENERATE, "all requests of this worker"),
        _foreign("engine_async_generate", "a single-turn batch inside the engine"),
        Event(
            GENERATE_MONITORED,
            "all requests, with rollout control (by our trainer, of all workers)",
            "total_requests, target_completion, completed_count",
        ),
        _foreign(SORTING, "results back in the order of the prompts"),
        _foreign(BARRIER_WAIT, "waiting for the other workers"),
        _foreign("barrier", "the barrier's own cost"),
        _foreign(BROADCAST, "results go to the other ranks"),
        _foreign(DATA_EXTRACTION, "tokens and masks are collected from the requests"),
        _foreign(PADDING, "collected tokens are padded to one length"),
        _foreign(CONCATENATION, "prompts and responses are joined"),
        _foreign(BATCH_CONSTRUCTION, "the batch is built"),
        _foreign(CACHE_FLUSH, "the engine's prefix cache is dropped"),
        _foreign(FINAL_CONSTRUCTION, "the batch is handed over"),
        _foreign(RESPONSE_LENGTHS, "lengths of the step's responses", "min, max, mean"),
        _foreign(TOTAL_STEP, "the whole of the worker's step"),
    ),
    *_rows(
        "step of the trainer",
        "mux",
        Event(PHASE, "a phase under its lease", "phase (init/rollout/train), nodes, token"),
        Event(LEASE_WAIT, "waiting for the lease of a phase", "phase, nodes, token"),
        Event(LEASE_FENCED, "the coordinator did not answer: memory slept, until it was taken up again", "phase, nodes, token"),
        Event(
            SYNC,
            "weights go from trainer to rollout; bytes that trainers sent, bytes by class of"
            " link (slow: between pools); seconds of the slowest end: until a rank's weights lay ready (gather), of all its"
            " streams in sending, until the first byte (wait), from it to the last (receive), in the engine (load)",
            "bytes, version, ranks, slow_bytes, fast_bytes, local_bytes, gather_seconds, send_seconds,"
            " wait_seconds, receive_seconds, load_seconds, stream_gb_per_s",
        ),
        Event(SLEEP, "tagged memory is released (an engine's by its server)", "tag, bytes, mapped, node, side (rollout/train)"),
        Event(
            WAKE, "tagged memory is mapped again (an engine's by its server)", "tag, bytes, mapped, node, side (rollout/train)"
        ),
        Event(GENERATE_PHASE, "from the rollout lease's engines awake to the last sample"),
        Event(SAMPLE_WAIT, "the trainer waits for samples"),
        Event(SAMPLE_READY, "from the last sample to asking for the training lease"),
        Event(MIGRATION, "the rollout's tail was gathered, nodes went back before its end", "nodes, requests, tokens, gain_sec"),
        Event(
            GROWTH,
            "a rollout used nodes that are not its own, while no other job wanted them; requests that had to leave with it",
            "nodes, token, requests, leaving_sec",
        ),
        Event(OLD_LOG_PROB, "log-probabilities under the policy that sampled"),
        Event(REF, "log-probabilities under the reference policy"),
        Event(VALUES, "values from the critic"),
        Event(ADV, "advantages"),
        Event(UPDATE_CRITIC, "the critic's update"),
        Event(UPDATE_ACTOR, "the policy's update"),
        Event(SAVE_CHECKPOINT, "a checkpoint is written"),
        Event(VALIDATE, "validation"),
        Event(JOB_KEYS, "the job begins: its keys about rollout, each `key=value`", "keys"),
        Event(
            STEP,
            "a training step is over; duration of all of it",
            "reward, response_length, tokens, loss, grad_norm, seconds (by phase and part)",
        ),
    ),
    *_rows(
        "server replica",
        "mux",
        Event(
            ENGINE_QUEUE,
            "a request waited in the engine's queue, until its prefill; once more for each time it was thrown out",
            "request_id, turn, stay, replica, node, priority",
        ),
        Event(
            ENGINE_GENERATE,
            "one stay in the engine, as its server sees it",
            "request_id, turn, stay, replica, node, prompt_tokens, response_tokens, finish, version, priority, queue_sec, "
            "prefill_sec, decode_sec, held_sec, cached_tokens, retractions, drafted_tokens, accepted_tokens",
        ),
        Event(
            ENGINE_DECODE,
            "the engine's own counters, about once a second while it works; duration: since the ones before, 5 s at most",
            "replica, node, running, queued, token_usage, tokens_per_sec, prefill_tokens_per_sec, retracted, evicted_tokens",
        ),
        Event(
            ENGINE_RETRACT,
            "the engine threw running requests out for want of KV cache",
            "replica, node, requests, token_usage, request_ids",
        ),
        Event(
            ENGINE_STALLED,
            "an engine with requests stood still, from the second time on; duration: so far",
            "replica, node, running, path (of the stacks of its processes), how (py-spy/kernel)",
        ),
    ),
    *_rows(
        "coordinator",
        "mux",
        Event(LEASE_WAIT, "a job waited for a lease", "job, phase, nodes, token"),
        Event(
            LEASE_HELD,
            "a job held a lease; duration from grant to return; `leaving_s` of a filler: since it was asked to leave",
            "job, phase, nodes, token, filler, leaving_s",
            "pool",
        ),
        Event(LEASE_RECLAIMED, "a lease ended although its job did not return it", "job, phase, nodes, token"),
        Event(MEMORY, "bytes held on a node: this job's by tag, and all jobs' together", "job, node, tags, node_bytes"),
        Event(
            HOST_MEMORY,
            "host memory of a job's processes on a node, `kinds`: by kind; what counts for it and for all jobs there",
            "job, node, bytes, kinds, source (agent/job), counted, node_bytes, capacity",
        ),
        Event(SEGMENT, "a part of the run begins in which jobs take turns in one manner", "index, mode"),
        Event(STEP_REPORT, "a job reported the figures of a step", "job, reward, response_length, tokens, loss, grad_norm"),
        Event(PHASE_OVERDUE, "a phase takes far longer than earlier phases of its kind in the job", "job, phase, nodes, token"),
        Event(HOST_SEEN, "an agent's first message, or its first after a silence", "host, addresses, boot"),
        Event(HOST_GONE, "an agent was silent for as long as a lease lasts", "host"),
        Event(NODE_FENCED, "the node is not granted from here on", "node, reason"),
        Event(NODE_UNFENCED, "the node may be granted again", "node"),
        Event(NODE_DRAINING, "the coordinator's file takes the node out of use, or takes that back", "node, undo"),
        Event(POOLS_CHANGED, "nodes came or left by the coordinator's file", "added, removed"),
        Event(JOB_REGISTERED, "a job came", "job, nodes, seed, steps, pid, filler"),
        Event(JOB_EXITED, "a job left", "job, reason"),
        Event(JOB_SILENT, "a job's heartbeats stopped", "job, pid, host"),
        Event(JOB_RESUMED, "the job's heartbeats came back", "job"),
        Event(
            PLACED,
            "a job got nodes of the coordinator's choice, or waits for them",
            "job, outcome, strategy, group, nodes, usd_per_hour, wait, estimated, alternatives",
        ),
        Event(GROUP_PREDICTED, "a co-execution group's periods", "group, nodes, order, source, periods, limits, usd_per_hour"),
        Event(ESTIMATE_ERROR, "a phase beside its estimate", "job, phase, source, estimated_s, observed_s, ratio"),
        Event(SLO_AT_RISK, "a period limit was about to be exceeded, and what was done about it", "kind, group, job, reason"),
        Event(
            MOVE_ASKED,
            "a running job is to go to other nodes; what that is expected to take",
            "job, number, nodes, before, group, expected_s",
        ),
        Event(
            JOB_MOVED,
            "a job that moved begins a step there; duration from the end of the one before (`done`), its checkpoint included",
            "job, number, nodes, before, done",
        ),
        Event(MOVE_GIVEN_UP, "a job ended instead of moving, or did not come back in time", "job, number, reason"),
    ),
    *_rows(
        "agent",
        "mux",
        Event(
            DEVICE_MEMORY,
            "a process of a job holds more or less device memory on a node than at the look before",
            "host, node, job, pid, bytes, before, leased_to, token, source (nvml/ledger)",
        ),
        Event(AGENT_KILLED, "a process that outlived its job was killed", "host, job, pid"),
    ),
    *_rows(
        "the log itself",
        "mux",
        Event(LOG_OPEN, "a process opened its log", "host, pid, utc_offset_sec"),
        Event(LOG_DROPPED, "events lost because the queue was full", "count"),
        Event(
            LOG_COST,
            "what this process's log cost since the last such line (VERL_MUX_LOG_COST=1)",
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

# What reaches back over time in which its request could not run, in logs that tell stays.
REACHING_BACK = (REQUEST_START, REQUEST_COMPLETE, REQUEST_ABORTED, REQUEST_PARKED)

# Which pool a phase's lease is paid for; `init` is no work.
POOL_OF_PHASE = {"rollout": "rollout", "sync": "rollout", "validate": "rollout", "train": "train"}

# Events that contain others of their own level; shares of a step leave them out.
ENCLOSING = {TOTAL_STEP, STEP, PHASE, GENERATE_MONITORED, "engine_async_generate", "barrier", LEASE_HELD}


def table(ours: bool = True) -> str:
    """What verl_mux writes, or else what is read in others' logs besides; as Markdown, for docs/event_log.md."""
    if ours:
        head, rule = "| event | logged for | meaning | `extra` | name by |", "| --- | --- | --- | --- | --- |"
        rows = [f"| `{e.name}` | {e.level} | {e.meaning} | {e.extra} | {e.origin} |" for e in TABLE if e.written]
        return "\n".join([head, rule, *rows])
    head, rule = "| event | logged for | meaning | `extra` |", "| --- | --- | --- | --- |"
    rows = [f"| `{e.name}` | {e.level} | {e.meaning} | {e.extra} |" for e in TABLE if not e.written]
    rows += [f"| `{e.name}` | {e.level} | as above | {e.unwritten} |" for e in TABLE if e.written and e.unwritten]
    return "\n".join([head, rule, *rows])
