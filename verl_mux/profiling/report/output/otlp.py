"""An event log as OpenTelemetry spans: OTLP JSON, one batch a line as OpenTelemetry's file exporter writes, for any viewer.

A request is a trace with its stays in engines, tools and reward as spans; a step of the trainer is one too. Generations carry
the `gen_ai.*` attributes of the semantic conventions, every span its line of the log (`mux.line`), so that nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, LogFile, read_lines
from verl_mux.profiling.report.input.otlp import LINE

BATCH = 1000
_INTERNAL, _CLIENT = 1, 3  # kinds of spans
_GENERATIONS = (events.TURN_ENGINE_CALL, events.ENGINE_GENERATE)


def write_otlp(files: Iterable[LogFile], path: Path) -> int:
    """How many spans were written."""
    count = 0
    with path.open("w") as out:
        for (job, role, worker), spans in _batches(files):
            about = {"service.name": job or "verl", "service.instance.id": f"{role} {worker}"}
            scope = {"scope": {"name": "verl_mux"}, "spans": spans}
            out.write(json.dumps({"resourceSpans": [{"resource": {"attributes": _told(about)}, "scopeSpans": [scope]}]}) + "\n")
            count += len(spans)
    return count


def _batches(files: Iterable[LogFile]) -> Iterator[tuple[tuple[str, str, int], list[dict[str, Any]]]]:
    for file in files:
        spans: list[dict[str, Any]] = []
        for line in read_lines([file]):
            if line.event in events.ABOUT_THE_LOG:
                continue
            spans.append(_span(line))
            if len(spans) == BATCH:
                yield (line.job, line.role, line.workid), spans
                spans = []
        if spans:
            yield (line.job, line.role, line.workid), spans


def _span(line: Line) -> dict[str, Any]:
    request = line.extra.get("request_id")
    of = (line.job, line.run, request) if request else (line.job, line.run, line.role, line.step)
    whole = line.event in (events.REQUEST_COMPLETE, events.STEP)
    span = {
        "traceId": _id(32, *of),
        "spanId": _id(16, *of) if whole else _id(16, *of, line.event, line.timestamp, line.extra.get("stay"), line.workid),
        "name": line.event,
        "kind": _CLIENT if line.event == events.TURN_ENGINE_CALL else _INTERNAL,
        "startTimeUnixNano": str(_nano(line.end - line.seconds)),
        "endTimeUnixNano": str(_nano(line.end)),
        "attributes": _told(_attributes(line)),
        "status": {"code": 2} if line.extra.get("error") else {},
    }
    return span if whole else span | {"parentSpanId": _id(16, *of)}


def _attributes(line: Line) -> dict[str, Any]:
    told: dict[str, Any] = {"mux.step": line.step, "mux.role": line.role}
    if line.event in _GENERATIONS:
        told |= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": line.extra.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": line.extra.get("response_tokens"),
            "server.address": line.extra.get("node"),
        }
    if line.event == events.TOOL_EXECUTION:
        told |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": line.extra.get("tool")}
    written = {
        "timestamp": line.timestamp.isoformat(timespec="microseconds"), "event": line.event, "duration_sec": line.duration_sec,
        "extra": line.extra or None, "workid": line.workid, "step": line.step, "role": line.role, "job": line.job,
        "run": line.run,
    }  # fmt: skip
    return told | {LINE: json.dumps({key: value for key, value in written.items() if value is not None})}


def _told(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _id(digits: int, *parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=digits // 2).hexdigest()


def _nano(seconds: float) -> int:
    return round(seconds * 1e6) * 1000
