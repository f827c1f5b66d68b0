"""OpenTelemetry spans (OTLP as JSON) to an event log and back. Runs on the command line; called by foreign.py and
report_command.py; reads and writes files.

A request is a trace, its root span the request's life; a step of the trainer is a trace too. What a span is follows from the
semantic conventions for generative AI (`gen_ai.*`, https://opentelemetry.io/docs/specs/semconv/gen-ai/), else from
OpenInference:

    a model's answer   turn_engine_call   gen_ai.operation.name chat, text_completion, generate_content; kind LLM
    a tool's           tool_execution     gen_ai.operation.name execute_tool; kind TOOL
    a judgement        reward_calculation kind EVALUATOR
    any other          under its own name

`step` is the attribute of that name (`training.step`, `mux.step`) of the span, its root or its resource; else 0. A worker is a
`service.instance.id`, a replica a `server.address` and `server.port`; both are numbered in order of appearance. Every span
that verl_mux writes carries its line of the log (`mux.line`), so nothing is lost. Ids of other writers need not be
hexadecimal, so protobuf's JSON parser cannot read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import MAX_STEP, ROLES, Line, LogFile
from verl_mux.profiling.plain.lines import read_lines as read_log
from verl_mux.profiling.report.formats.log_line import log_line

_ANSWERS = ("chat", "text_completion", "generate_content")
_KINDS = {"LLM": events.TURN_ENGINE_CALL, "TOOL": events.TOOL_EXECUTION, "EVALUATOR": events.REWARD}
_STEPS = ("step", "training.step", "mux.step")
_ALLOWED = "give a directory of event logs, or JSON with resourceSpans"
_LINE = "mux.line"
_BATCH = 1000  # spans a line of the output
_INTERNAL, _CLIENT = 1, 3  # kinds of spans


def read_lines(source: Path) -> list[dict[str, Any]]:
    """The spans of a file as lines of an event log. Raises UserError for a file without OTLP JSON."""
    try:
        return list(_as_lines(_read(source)))
    except KeyError as error:
        raise UserError(f"{source} is no OTLP JSON: {error} is missing; {_ALLOWED}") from None
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{source} is no OTLP JSON: {error}; {_ALLOWED}") from None


def _read(source: Path) -> list[dict[str, Any]]:
    """The spans, each with the `resource` that made it, of one JSON object or one a line (OpenTelemetry's file exporter)."""
    text = source.read_text()
    try:
        batches = [json.loads(text)]
    except json.JSONDecodeError:
        *whole, last = [line for line in text.splitlines() if line.strip()] or [""]
        batches = [json.loads(line) for line in whole]
        with contextlib.suppress(json.JSONDecodeError) if whole else contextlib.nullcontext():
            batches.append(json.loads(last))  # the line that its writer was at, or was killed at, may be torn
    return [span for batch in batches for span in _spans(batch)]


def _spans(batch: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(batch, dict):
        raise TypeError(f"an object is expected, not a {type(batch).__name__}")
    for resource in batch["resourceSpans"]:
        about = _attributes(resource.get("resource", {}))
        for span in itertools.chain.from_iterable(scope.get("spans", []) for scope in resource.get("scopeSpans", [])):
            times = {key: int(span[f"{key}TimeUnixNano"]) / 1e9 for key in ("start", "end")}
            names = {key: str(span[key]) for key in ("traceId", "name")}
            yield {**span, **times, **names, "attributes": _attributes(span), "resource": about}


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: _plain_value(each.get("value", {})) for each in holder.get("attributes", [])}


def _plain_value(value: dict[str, Any]) -> Any:
    for kind, plain in value.items():
        if kind == "arrayValue":
            return [_plain_value(each) for each in plain.get("values", [])]
        return int(plain) if kind == "intValue" else plain
    return None


def _as_lines(spans: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines of an event log, as JSON objects."""
    roots = {span["traceId"]: span for span in spans if not span.get("parentSpanId")}
    workers, replicas, turns = dict[Any, int](), dict[Any, int](), dict[str, int]()
    for span in sorted(spans, key=lambda span: (span["end"], not span.get("parentSpanId"))):  # a root after what ended with it
        trace, about = span["traceId"], span["attributes"]
        if _LINE in about:
            yield _our_line(about[_LINE])
            continue
        root = roots.get(trace, span)
        extra: dict[str, Any] = {"request_id": trace}
        name = _event(span, span is root)
        if name == events.TURN_ENGINE_CALL:
            turns[trace] = turns.get(trace, 0) + 1
            extra |= _answer(about, replicas, turns[trace])
        elif name == events.TOOL_EXECUTION:
            extra |= {"turn": turns.get(trace, 1), "tool": about.get("gen_ai.tool.name", span["name"])}
        elif name == events.REQUEST_COMPLETE:
            extra |= {"turns": turns.get(trace, 0) or None}
        worker = span["resource"].get("service.instance.id", root["resource"].get("service.instance.id", ""))
        holders = (span["attributes"], root["attributes"], span["resource"], root["resource"])
        steps = (holder[key] for holder in holders for key in _STEPS if isinstance(holder.get(key), int))
        known = {key: value for key, value in extra.items() if value is not None}
        step, number = min(max(next(steps, 0), 0), MAX_STEP), workers.setdefault(repr(worker), len(workers))
        end, seconds = datetime.fromtimestamp(span["end"]), round(span["end"] - span["start"], 6)
        yield log_line(end, name, seconds, known, step, "rollout", number, str(span["resource"].get("service.name", "")))


def _our_line(text: str) -> dict[str, Any]:
    """Raises ValueError or TypeError for text that is no line of a log, as its words become a path."""
    line = json.loads(text)
    numbers = [line.get(key) for key in ("step", "workid")] if isinstance(line, dict) else []
    in_range = numbers and all(type(number) is int and 0 <= number <= MAX_STEP for number in numbers)
    if not in_range or line.get("role") not in ROLES or not isinstance(line.get("timestamp"), str):
        raise ValueError(f"an attribute {_LINE} is no line of an event log")
    return line


def _event(span: dict[str, Any], is_root: bool) -> str:
    about = span["attributes"]
    operation = about.get("gen_ai.operation.name")
    if operation in _ANSWERS:
        return events.TURN_ENGINE_CALL
    if operation == "execute_tool":
        return events.TOOL_EXECUTION
    named = _KINDS.get(str(about.get("openinference.span.kind", "")).upper())
    return named or (events.REQUEST_COMPLETE if is_root else str(span["name"]))


def _answer(about: dict[str, Any], replicas: dict[Any, int], turn: int) -> dict[str, Any]:
    address, reasons = about.get("server.address"), about.get("gen_ai.response.finish_reasons")
    server = repr((address, about.get("server.port")))
    return {
        "turn": turn,
        "stay": turn,
        "prompt_tokens": about.get("gen_ai.usage.input_tokens", about.get("llm.token_count.prompt")),
        "response_tokens": about.get("gen_ai.usage.output_tokens", about.get("llm.token_count.completion")),
        "finish_reason": reasons[0] if isinstance(reasons, list) and reasons else None,
        "replica": None if address is None else replicas.setdefault(server, len(replicas)),
        "node": None if address is None else str(address),
    }


def write_otlp(files: Iterable[LogFile], path: Path) -> int:
    """Write logs as OTLP JSON, one batch a line as OpenTelemetry's file exporter does; return the count of spans."""
    count = 0
    with path.open("w") as out:
        for file in files:
            lines = (line for line in read_log([file]) if line.event not in events.ABOUT_THE_LOG)
            while batch := list(itertools.islice(lines, _BATCH)):
                last = batch[-1]
                about = {"service.name": last.job or "verl", "service.instance.id": f"{last.role} {last.workid}"}
                scope = {"scope": {"name": "verl_mux"}, "spans": [_span(line) for line in batch]}
                resource = {"resource": {"attributes": _keys_and_values(about)}, "scopeSpans": [scope]}
                out.write(json.dumps({"resourceSpans": [resource]}) + "\n")
                count += len(batch)
    return count


def _span(line: Line) -> dict[str, Any]:
    request = line.extra.get("request_id")
    trace = (line.job, line.run, request) if request else (line.job, line.run, line.role, line.step)
    whole = line.event in (events.REQUEST_COMPLETE, events.STEP)
    own = trace if whole else (*trace, line.event, line.timestamp, line.extra.get("stay"), line.workid)
    span = {
        "traceId": _id(32, *trace),
        "spanId": _id(16, *own),
        "name": line.event,
        "kind": _CLIENT if line.event == events.TURN_ENGINE_CALL else _INTERNAL,
        "startTimeUnixNano": str(round(line.start * 1e6) * 1000),
        "endTimeUnixNano": str(round(line.end * 1e6) * 1000),
        "attributes": _keys_and_values(_about(line)),
        "status": {"code": 2} if line.extra.get("error") else {},
    }
    return span if whole else span | {"parentSpanId": _id(16, *trace)}


def _about(line: Line) -> dict[str, Any]:
    about: dict[str, Any] = {"mux.step": line.step, "mux.role": line.role}
    if line.event in (events.TURN_ENGINE_CALL, events.ENGINE_GENERATE):
        about |= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": line.extra.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": line.extra.get("response_tokens"),
            "server.address": line.extra.get("node"),
        }
    if line.event == events.TOOL_EXECUTION:
        about |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": line.extra.get("tool")}
    written = msgspec.structs.asdict(line) | {"timestamp": line.timestamp.isoformat(timespec="microseconds")}
    return about | {_LINE: json.dumps({key: value for key, value in written.items() if value not in (None, {})})}


def _keys_and_values(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _wrapped(value)} for key, value in attributes.items() if value is not None]


def _wrapped(value: Any) -> dict[str, Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"intValue": str(value)}
    kind = {bool: "boolValue", float: "doubleValue"}.get(type(value))
    return {kind: value} if kind else {"stringValue": str(value)}


def _id(digits: int, *parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=digits // 2).hexdigest()
