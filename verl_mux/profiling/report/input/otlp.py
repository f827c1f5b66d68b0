"""OpenTelemetry spans (OTLP as JSON) as an event log: traces of other agent frameworks, and what output/otlp.py writes.

A trace is a request, its root span the request's life. What a span is comes from the semantic conventions for generative AI
(`gen_ai.*`, https://opentelemetry.io/docs/specs/semconv/gen-ai/), else from OpenInference's `openinference.span.kind`:

    a model's answer   turn_engine_call   gen_ai.operation.name chat, text_completion, generate_content; kind LLM
    a tool's           tool_execution     gen_ai.operation.name execute_tool; kind TOOL
    a judgement        reward_calculation kind EVALUATOR
    any other          under its own name

`step` is the attribute of that name (`training.step`, `mux.step`), of the span, its root or its resource; else 0. A worker is a
`service.instance.id`, a replica a `server.address` and `server.port`; both are numbered in order of appearance.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import MAX_STEP, ROLES

ANSWERS = ("chat", "text_completion", "generate_content")
_KINDS = {"LLM": events.TURN_ENGINE_CALL, "TOOL": events.TOOL_EXECUTION, "EVALUATOR": events.REWARD}
_STEPS = ("step", "training.step", "mux.step")
_ALLOWED = "give a directory of event logs, or JSON with resourceSpans"
LINE = "mux.line"  # of our own spans: their line of the log, as it was


def write_as_log(source: Path, directory: Path) -> int:
    """The spans of a file as `<directory>/<role>/step_<N>/worker_<R>.jsonl`; how many.

    Raises:
        UserError: the file holds no OTLP JSON.
    """
    lines: dict[Path, list[tuple[str, str]]] = {}
    count = 0
    with _refused(source):
        for line in as_lines(read(source)):
            path = directory / line["role"] / f"step_{line['step']}" / f"worker_{line['workid']}.jsonl"
            lines.setdefault(path, []).append((line["timestamp"], json.dumps(line)))
            count += 1
    for path, texts in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(text + "\n" for _, text in sorted(texts, key=lambda text: text[0])))
    return count


@contextlib.contextmanager
def _refused(source: Path) -> Iterator[None]:
    """Whatever is not as the specification has it: a UserError that says where."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"{source} is no OTLP JSON: {error} is missing; {_ALLOWED}") from None
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{source} is no OTLP JSON: {error}; {_ALLOWED}") from None


def read(source: Path) -> list[dict[str, Any]]:
    """Its spans, each with `resource`, the attributes of where it was made. One JSON object, or one a line, as OpenTelemetry's
    file exporter writes them.

    Raises:
        UserError: it is neither.
    """
    with _refused(source):
        text = source.read_text()
        try:
            batches = [json.loads(text)]
        except json.JSONDecodeError:
            batches = [json.loads(line) for line in text.splitlines() if line.strip()]
        spans = [span for batch in batches for span in _spans(batch)]
    if not spans:
        raise UserError(f"{source} holds no spans; {_ALLOWED}")
    return spans


def _spans(batch: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(batch, dict):
        raise TypeError(f"an object is expected, given is a {type(batch).__name__}")
    for resource in batch["resourceSpans"]:
        about = _attributes(resource.get("resource", {}))
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                times = {key: int(span[f"{key}TimeUnixNano"]) / 1e9 for key in ("start", "end")}
                named = {key: str(span[key]) for key in ("traceId", "name")}
                yield {**span, **times, **named, "attributes": _attributes(span), "resource": about}


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {it["key"]: _value(it.get("value", {})) for it in holder.get("attributes", [])}


def _value(value: dict[str, Any]) -> Any:
    for kind, plain in value.items():
        if kind == "intValue":
            return int(plain)
        if kind == "arrayValue":
            return [_value(it) for it in plain.get("values", [])]
        return plain
    return None


def as_lines(spans: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines of an event log, as JSON objects."""
    every = list(spans)
    roots = {span["traceId"]: span for span in every if not span.get("parentSpanId")}
    workers, replicas = _Numbers(), _Numbers()
    turns: dict[str, int] = {}
    for span in sorted(every, key=lambda it: (it["end"], not it.get("parentSpanId"))):  # a root after all that ended with it
        if LINE in span["attributes"]:
            yield _our_line(span["attributes"][LINE])
            continue
        root = roots.get(span["traceId"], span)
        extra: dict[str, Any] = {"request_id": span["traceId"]}
        name = _event(span, span is root)
        if name == events.TURN_ENGINE_CALL:
            turns[span["traceId"]] = turns.get(span["traceId"], 0) + 1
            extra |= _answer(span["attributes"], replicas, turns[span["traceId"]])
        elif name == events.TOOL_EXECUTION:
            extra |= {"turn": turns.get(span["traceId"], 1), "tool": span["attributes"].get("gen_ai.tool.name", span["name"])}
        elif name == events.REQUEST_COMPLETE:
            extra |= {"turns": turns.get(span["traceId"], 0) or None}
        worker = span["resource"].get("service.instance.id", root["resource"].get("service.instance.id", ""))
        yield {
            "timestamp": datetime.fromtimestamp(span["end"]).isoformat(timespec="microseconds"),
            "event": name,
            "duration_sec": round(max(span["end"] - span["start"], 0.0), 6),
            "extra": {key: value for key, value in extra.items() if value is not None},
            "workid": workers.of(worker),
            "step": _step(span, root),
            "role": "rollout",
            "job": str(span["resource"].get("service.name", "")),
        }


def _our_line(text: str) -> dict[str, Any]:
    """Raises ValueError, TypeError for what is no line of a log, as its words become a path."""
    line = json.loads(text)
    numbers = [line.get(key) for key in ("step", "workid")] if isinstance(line, dict) else []
    in_range = numbers and all(type(number) is int and 0 <= number <= MAX_STEP for number in numbers)
    if not in_range or line.get("role") not in ROLES or not isinstance(line.get("timestamp"), str):
        raise ValueError(f"an attribute {LINE} is no line of an event log")
    return line


def _event(span: dict[str, Any], is_root: bool) -> str:
    told = span["attributes"]
    operation = told.get("gen_ai.operation.name")
    if operation in ANSWERS:
        return events.TURN_ENGINE_CALL
    if operation == "execute_tool":
        return events.TOOL_EXECUTION
    named = _KINDS.get(str(told.get("openinference.span.kind", "")).upper())
    if named:
        return named
    return events.REQUEST_COMPLETE if is_root else str(span["name"])


def _answer(told: dict[str, Any], replicas: _Numbers, turn: int) -> dict[str, Any]:
    address = told.get("server.address")
    tokens = told.get("gen_ai.usage.output_tokens", told.get("llm.token_count.completion"))
    reasons = told.get("gen_ai.response.finish_reasons")
    return {
        "turn": turn,
        "stay": turn,
        "prompt_tokens": told.get("gen_ai.usage.input_tokens", told.get("llm.token_count.prompt")),
        "response_tokens": tokens,
        "finish_reason": reasons[0] if isinstance(reasons, list) and reasons else None,
        "replica": None if address is None else replicas.of((address, told.get("server.port"))),
        "node": None if address is None else str(address),
    }


def _step(span: dict[str, Any], root: dict[str, Any]) -> int:
    for holder in (span["attributes"], root["attributes"], span["resource"], root["resource"]):
        for key in _STEPS:
            if isinstance(holder.get(key), int):
                return min(max(holder[key], 0), MAX_STEP)
    return 0


class _Numbers:
    """0, 1, ... in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        return self._known.setdefault(repr(name), len(self._known))
