"""What the report reads of a line: the format's own keys, and those of `extra` that some part of the analysis uses."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Int = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class TurnTiming(msgspec.Struct, gc=False):
    """An entry of `extra.turn_timings` of a completed request; seconds."""

    total_duration: float | None = None
    engine_call_duration: float | None = None
    post_process_duration: float | None = None


class Extra(msgspec.Struct, gc=False):
    request_id: str | Int | None = None
    turn: Small | float | None = None
    turns: Small | None = None
    generated_tokens: Int | None = None
    response_tokens: Int | None = None
    actual_response_tokens: Int | None = None
    response_length: Int | float | None = None
    validate: bool | None = None
    turn_timings: list[TurnTiming] | None = None
    job: str | None = None
    phase: str | None = None
    pool: str | None = None
    nodes: list[str] | dict[str, Any] | None = None
    node: str | None = None
    tag: str | None = None
    side: str | None = None
    bytes: Int | float | None = None
    version: Int | None = None
    running: Int | float | None = None
    queued: Int | float | None = None
    token_usage: float | None = None
    tokens_per_sec: float | None = None
    prefill_tokens_per_sec: float | None = None
    mode: str | None = None
    node_bytes: Int | None = None
    reward: float | None = None
    stay: Small | None = None
    replica: Small | None = None
    queue_sec: float | None = None
    prefill_sec: float | None = None
    decode_sec: float | None = None
    held_sec: float | None = None
    parked_sec: float | None = None
    finish: str | None = None
    finish_reason: str | None = None
    retractions: Small | None = None
    requests: Int | None = None
    tool: str | None = None
    score: float | None = None
    batch_data_id: str | Int | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    keys: list[str] | None = None
    total_requests: Count | None = None
    target_completion: Count | None = None
    path: str | None = None


class Line(msgspec.Struct, gc=False):
    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: Extra | None = None
    workid: Count | None = None
    step: Count | None = None
    role: str | None = None
    job: str | None = None
    run: str | None = None
    request_id: str | Int | None = None  # the sglang logger lets callers put further keys at the top
    turn: Small | float | None = None


NO_EXTRA = Extra()
EXTRA_KEYS = frozenset(Extra.__struct_fields__)
EXTRA_TYPES = {field.name: field.type for field in msgspec.structs.fields(Extra)}
