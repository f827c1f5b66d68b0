"""Every event name and its meaning: the table of record, printed in docs/event_log.md.

Names of the sglang multi-turn profiling logs are kept where the same thing is meant (`origin` says "sglang"); verl_mux's own are
"mux". Imported by every process that writes or reads a log; pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Event:
    """One row of the table: what it means, the keys of its `extra`, which process logs it, and where its name comes from.

    written: False where verl_mux does not log the event but reads it in other logs. unwritten: keys of `extra` that verl_mux
    reads but does not write.
    """

    level: str
    origin: str
    written: bool
    name: str
    meaning: str
    extra: str = ""
    unwritten: str = ""


TABLE: list[Event] = []


def _row(level: str, origin: str, written: bool, name: str, *about: str) -> str:
    """Add a row; return the event's name."""
    TABLE.append(Event(level, origin, written, name, *about))
    return name


# A request's events by their names in sglang's logs, written by verl_mux or read alone; and those that verl_mux adds.
_request, _other = (partial(_row, "request", "sglang", written) for written in (True, False))
_own = partial(_row, "request", "mux", True)
_worker, _other_worker = (partial(_row, "step of a rollout worker", "sglang", written) for written in (True, False))
_trainer = partial(_row, "step of the trainer", "mux", True)
_server = partial(_row, "server replica", "mux", True)
_coordinator = partial(_row, "coordinator", "mux", True)
_agent = partial(_row, "agent", "mux", True)
_itself = partial(_row, "the log itself", "mux", True)

# One request (role "rollout", worker = agent loop worker; `extra.request_id` always).
REQUEST_START = _request("request_start", "a request begins", "request_id, batch_data_id, session, validate")
PENDING = _other("pending_state_handling", "set up before the first turn", "request_id")
_other("tool_creation_pending_state", "tools are made, inside pending_state_handling", "request_id")
_other("interaction_start_pending_state", "the interaction is started, inside pending_state_handling", "request_id")
_other("main_loop", "all turns of a request", "request_id")
_other("turn_start", "a turn begins", "request_id, turn")
TURN_PREPROCESS = _request(
    "turn_pre_process", "from the request's start, or the end of its previous part, to the turn's engine call", "request_id, turn"
)
_other("engine_generate_setup", "sampling parameters are made, inside the engine call", "request_id, turn")
TURN_ENGINE_CALL = _request(
    "turn_engine_call",
    "one stay in an engine, as the caller waits for it: a turn's generation, or a part of it where it was cut off",
    "request_id, turn, stay, prompt_tokens, response_tokens, finish_reason, replica, node, queue_sec, held_sec, version",
    "generated_tokens",
)
_other("engine_async_generate_actual", "the engine's part of turn_engine_call", "request_id, turn")
TURN_TOOL_PARSING = _other("turn_tool_parsing", "tool calls are read from the response", "request_id, turn")
TOOL_EXECUTION = _request("tool_execution", "one tool call, or a turn's calls together", "request_id, turn, tool")
TOOL_RESPONSE = _other("tool_response_processing", "tool results become tokens", "request_id, turn")
_other("tool_calling_state", "tool_execution and tool_response_processing together", "request_id, turn")
INTERACTION = _other("interaction_response", "the simulated user answers", "request_id, turn")
_other("interacting_state", "interaction_response and what goes with it", "request_id, turn")
TURN_POSTPROCESS = _other("turn_post_process", "from the engine's answer to the turn's end", "request_id, turn")
TURN_END = _other("turn_end", "a turn is over; duration of all of it", "request_id, turn")
REWARD = _request("reward_calculation", "the request's reward is computed", "request_id, turn, score")
FINALIZATION = _request("finalization", "tokens, masks and padding of the finished request", "request_id, turn")
REQUEST_COMPLETE = _request(
    "async_rollout_request_complete",
    "a request is over; duration from its start, with all the time in which it was parked",
    "request_id, batch_data_id, session, validate, finish_reason, turns, stays, response_length, parked_sec, score",
    "turn_timings, actual_response_tokens",
)
REQUEST_ABORTED = _request(
    "aborted_request_with_cancelled_error",
    "a request was cut off (reason `cut off`, an instant: it may go on), or given up (`cancelled`, `failed`); duration, "
    "where it has one, from its start",
    "request_id, reason, response_length",
)
REQUEST_PADDED = _request(
    "aborted_request_with_cancelled_error_padding", "a cancelled request is replaced by padding", "request_id"
)

REQUEST_MIGRATED = _own("request_migrated", "a request moved to another replica", "request_id, source, target, tokens")
REQUEST_REQUEUED = _own("request_requeued", "a request that was cut off goes on, with the tokens it has", "request_id, tokens")
REQUEST_PARKED = _own(
    "request_parked",
    "a request could not generate: `not launched` yet, `cut off`, its round's `budget` used up, or begun again after it "
    "had `failed`; logged in the step in which it goes on",
    "request_id, turn, reason",
)
REQUEST_TEXT = _own(
    "request_text",
    "a request's prompt and response, tools' results included; for a share of them (`mux.profile.texts`)",
    "request_id, prompt, response, left_out (characters)",
)

# One rollout worker's step.
PREPROCESSING = _other_worker("preprocessing_duration", "prompts become requests")
GENERATE = _other_worker("async_generate_duration", "all requests of this worker")
_other_worker("engine_async_generate", "a single-turn batch inside the engine")
GENERATE_MONITORED = _worker(
    "async_rollout_with_monitoring_duration",
    "all requests, with rollout control (by our trainer, of all workers)",
    "total_requests, target_completion, completed_count",
)
_other_worker("sorting_duration", "results back in the order of the prompts")
BARRIER_WAIT = _other_worker("barrier_wait_duration", "waiting for the other workers")
_other_worker("barrier", "the barrier's own cost")
_other_worker("broadcast_duration", "results go to the other ranks")
_other_worker("data_extraction_duration", "tokens and masks are collected from the requests")
_other_worker("padding_duration", "collected tokens are padded to one length")
_other_worker("concatenation_duration", "prompts and responses are joined")
_other_worker("batch_construction_duration", "the batch is built")
_other_worker("cache_flush_duration", "the engine's prefix cache is dropped")
_other_worker("final_construction_duration", "the batch is handed over")
_other_worker("step_response_length_stats", "lengths of the step's responses", "min, max, mean")
TOTAL_STEP = _other_worker("total_step_duration", "the whole of the worker's step")

# The trainer's step (role "trainer", worker 0).
PHASE = _trainer("phase", "a phase under its lease", "phase (init/rollout/train), nodes, token")
LEASE_WAIT = _trainer("lease_wait", "waiting for the lease of a phase", "phase, nodes, token")
LEASE_FENCED = _trainer(
    "lease_fenced", "the coordinator did not answer: memory slept, until it was taken up again", "phase, nodes, token"
)
SYNC = _trainer(
    "sync",
    "weights go from trainer to rollout; bytes that trainers sent, bytes by class of link (slow: between pools); seconds "
    "of the slowest end: until a rank's weights lay ready (gather), of all its streams in sending, until the first byte "
    "(wait), from it to the last (receive), in the engine (load)",
    "bytes, version, ranks, slow_bytes, fast_bytes, local_bytes, gather_seconds, send_seconds, wait_seconds, "
    "receive_seconds, load_seconds, stream_gb_per_s",
)
SLEEP = _trainer(
    "sleep", "tagged memory is released (an engine's by its server)", "tag, bytes, mapped, node, side (rollout/train)"
)
WAKE = _trainer(
    "wake", "tagged memory is mapped again (an engine's by its server)", "tag, bytes, mapped, node, side (rollout/train)"
)
GENERATE_PHASE = _trainer("generate", "from the rollout lease's engines awake to the last sample")
SAMPLE_WAIT = _trainer("sample_wait", "the trainer waits for samples")
SAMPLE_READY = _trainer("sample_ready", "from the last sample to asking for the training lease")
MIGRATION = _trainer(
    "tail_migration", "the rollout's tail was gathered, nodes went back before its end", "nodes, requests, tokens, gain_sec"
)
GROWTH = _trainer(
    "rollout_growth",
    "a rollout used nodes that are not its own, while no other job wanted them; requests that had to leave with it",
    "nodes, token, requests, leaving_sec",
)
OLD_LOG_PROB = _trainer("old_log_prob", "log-probabilities under the policy that sampled")
REF = _trainer("ref", "log-probabilities under the reference policy")
VALUES = _trainer("values", "values from the critic")
ADV = _trainer("adv", "advantages")
UPDATE_CRITIC = _trainer("update_critic", "the critic's update")
UPDATE_ACTOR = _trainer("update_actor", "the policy's update")
SAVE_CHECKPOINT = _trainer("save_checkpoint", "a checkpoint is written")
VALIDATE = _trainer("validate", "validation")
JOB_KEYS = _trainer("job_keys", "the job begins: its keys about rollout, each `key=value`", "keys")
STEP = _trainer(
    "step",
    "a training step is over; duration of all of it",
    "reward, response_length, tokens, loss, grad_norm, seconds (by phase and part)",
)

# One server replica (role "server", worker = replica).
ENGINE_QUEUE = _server(
    "engine_queue",
    "a request waited in the engine's queue, until its prefill; once more for each time it was thrown out",
    "request_id, turn, stay, replica, node, priority",
)
ENGINE_GENERATE = _server(
    "engine_generate",
    "one stay in the engine, as its server sees it",
    "request_id, turn, stay, replica, node, prompt_tokens, response_tokens, finish, version, priority, queue_sec, "
    "prefill_sec, decode_sec, held_sec, cached_tokens, retractions, drafted_tokens, accepted_tokens",
)
ENGINE_DECODE = _server(
    "engine_decode",
    "the engine's own counters, about once a second while it works; duration: since the ones before, 5 s at most",
    "replica, node, running, queued, token_usage, tokens_per_sec, prefill_tokens_per_sec, retracted, evicted_tokens",
)
ENGINE_RETRACT = _server(
    "engine_retract",
    "the engine threw running requests out for want of KV cache",
    "replica, node, requests, token_usage, request_ids",
)
ENGINE_STALLED = _server(
    "engine_stalled",
    "an engine with requests stood still, from the second time on; duration: so far",
    "replica, node, running, path (of the stacks of its processes), how (py-spy/kernel)",
)

# The coordinator (job "coordinator", role "coordinator"; `extra.job` names the job).
_coordinator(LEASE_WAIT, "a job waited for a lease", "job, phase, nodes, token")
LEASE_HELD = _coordinator(
    "lease_held",
    "a job held a lease; duration from grant to return; `leaving_s` of a filler: since it was asked to leave",
    "job, phase, nodes, token, filler, leaving_s",
    "pool",
)
LEASE_RECLAIMED = _coordinator("lease_reclaimed", "a lease ended although its job did not return it", "job, phase, nodes, token")
MEMORY = _coordinator("memory", "bytes held on a node: this job's by tag, and all jobs' together", "job, node, tags, node_bytes")
HOST_MEMORY = _coordinator(
    "host_memory",
    "host memory of a job's processes on a node, `kinds`: by kind; what counts for it and for all jobs there",
    "job, node, bytes, kinds, source (agent/job), counted, node_bytes, capacity",
)
SEGMENT = _coordinator("segment", "a part of the run begins in which jobs take turns in one manner", "index, mode")
STEP_REPORT = _coordinator(
    "step_report", "a job reported the figures of a step", "job, reward, response_length, tokens, loss, grad_norm"
)
PHASE_OVERDUE = _coordinator(
    "phase_overdue", "a phase takes far longer than earlier phases of its kind in the job", "job, phase, nodes, token"
)
HOST_SEEN = _coordinator("host_seen", "an agent's first message, or its first after a silence", "host, addresses, boot")
HOST_GONE = _coordinator("host_gone", "an agent was silent for as long as a lease lasts", "host")
NODE_FENCED = _coordinator("node_fenced", "the node is not granted from here on", "node, reason")
NODE_UNFENCED = _coordinator("node_unfenced", "the node may be granted again", "node")
NODE_DRAINING = _coordinator(
    "node_draining", "the coordinator's file takes the node out of use, or takes that back", "node, undo"
)
POOLS_CHANGED = _coordinator("pools_changed", "nodes came or left by the coordinator's file", "added, removed")
JOB_REGISTERED = _coordinator("job_registered", "a job came", "job, nodes, seed, steps, pid, filler")
JOB_EXITED = _coordinator("job_exited", "a job left", "job, reason")
JOB_SILENT = _coordinator("job_silent", "a job's heartbeats stopped", "job, pid, host")
JOB_RESUMED = _coordinator("job_resumed", "the job's heartbeats came back", "job")
PLACED = _coordinator(
    "placed",
    "a job got nodes of the coordinator's choice, or waits for them",
    "job, outcome, strategy, group, nodes, usd_per_hour, wait, estimated, alternatives",
)
GROUP_PREDICTED = _coordinator(
    "group_predicted", "a co-execution group's periods", "group, nodes, order, source, periods, limits, usd_per_hour"
)
ESTIMATE_ERROR = _coordinator(
    "estimate_error", "a phase beside its estimate", "job, phase, source, estimated_s, observed_s, ratio"
)
SLO_AT_RISK = _coordinator(
    "slo_at_risk", "a period limit was about to be exceeded, and what was done about it", "kind, group, job, reason"
)
MOVE_ASKED = _coordinator(
    "move_asked",
    "a running job is to go to other nodes; what that is expected to take",
    "job, number, nodes, before, group, expected_s",
)
JOB_MOVED = _coordinator(
    "job_moved",
    "a job that moved begins a step there; duration from the end of the one before (`done`), its checkpoint included",
    "job, number, nodes, before, done",
)
MOVE_GIVEN_UP = _coordinator(
    "move_given_up", "a job ended instead of moving, or did not come back in time", "job, number, reason"
)

# An agent (job "agent", role "agent"; `extra.host` names its host).
DEVICE_MEMORY = _agent(
    "device_memory",
    "a process of a job holds more or less device memory on a node than at the look before",
    "host, node, job, pid, bytes, before, leased_to, token, source (nvml/ledger)",
)
AGENT_KILLED = _agent("agent_killed", "a process that outlived its job was killed", "host, job, pid")

# The log about itself.
LOG_OPEN = _itself("log_open", "a process opened its log", "host, pid, utc_offset_sec")
LOG_DROPPED = _itself("log_dropped", "events lost because the queue was full", "count")
LOG_COST = _itself(
    "log_cost", "what this process's log cost since the last such line (VERL_MUX_LOG_COST=1)", "lines, caller_sec, writer_cpu_sec"
)

ABOUT_THE_LOG = (LOG_OPEN, LOG_DROPPED, LOG_COST)
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

# Events that reach back over time in which their request could not run, in logs that have stays.
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
