"""Spans of other frameworks as a log, and ours there and back."""

import json

import pytest

from tests.profiling.made_engines import make
from verl_mux.errors import UserError
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.formats.foreign import write_as_log
from verl_mux.profiling.report.formats.otlp import read_lines, write_otlp
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise

SECOND = 1_000_000_000
START = 1_755_000_000 * SECOND


def attributes(**told):
    kinds = {str: "stringValue", int: "intValue", list: "arrayValue"}
    wrapped = {
        key: {"values": [{"stringValue": it} for it in value]} if isinstance(value, list) else value
        for key, value in told.items()
    }
    return [{"key": key.replace("__", "."), "value": {kinds[type(told[key])]: value}} for key, value in wrapped.items()]


def span(trace, number, name, start, end, **told):
    parent = {} if number == 0 else {"parentSpanId": f"{trace}-0"}
    times = {"startTimeUnixNano": str(START + int(start * SECOND)), "endTimeUnixNano": str(START + int(end * SECOND))}
    return {"traceId": trace, "spanId": f"{trace}-{number}", "name": name, **parent, **times, "attributes": attributes(**told)}


def foreign(tmp_path, lines=False):
    """Two agents' requests of another framework: an answer, a tool, an answer, in its two spellings."""
    spans = [
        span("t1", 0, "agent.run", 0, 10, training__step=4),
        span("t1", 1, "chat qwen", 0, 4, gen_ai__operation__name="chat", gen_ai__usage__output_tokens=100,
             server__address="gpu-7", server__port=30000, gen_ai__response__finish_reasons=["stop"]),
        span("t1", 2, "search", 4, 6, gen_ai__operation__name="execute_tool", gen_ai__tool__name="search"),
        span("t1", 3, "chat qwen", 6, 10, gen_ai__operation__name="chat", gen_ai__usage__output_tokens=110,
             server__address="gpu-8", server__port=30000),
        span("t2", 0, "agent.run", 0, 5, training__step=4),
        span("t2", 1, "completion", 0, 5, openinference__span__kind="LLM", llm__token_count__completion=80),
    ]  # fmt: skip
    resource = {"attributes": attributes(service__name="agents", service__instance__id="worker-a")}
    batches = [{"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": its}]}]} for its in (spans[:3], spans[3:])]
    path = tmp_path / "spans.json"
    whole = {"resourceSpans": [it for batch in batches for it in batch["resourceSpans"]]}
    path.write_text("\n".join(map(json.dumps, batches)) if lines else json.dumps(whole))
    return path


def analysis(directory):
    return Analysis(read_files(directory, find_log_files(directory)))


@pytest.mark.parametrize("lines", [False, True])
def test_traces_of_others_become_requests_with_turns_tools_and_replicas(tmp_path, lines):
    assert write_as_log(foreign(tmp_path, lines), tmp_path / "log") == 6
    read = analysis(tmp_path / "log")
    first, second = read.requests.sort("request_id").to_dicts()
    assert (first["request_id"], first["job"], first["step"], first["status"]) == ("t1", "agents", 4, "complete")
    assert [first[key] for key in ("seconds", "turns", "engine", "tool", "tokens")] == pytest.approx([10.0, 2, 8.0, 2.0, 210])
    assert (second["tokens"], second["turns"]) == (80, 1)
    assert read.engines.node_of == {("agents", 0): "gpu-7", ("agents", 1): "gpu-8"}


def test_a_torn_last_line_costs_its_spans_alone(tmp_path):
    path = foreign(tmp_path, lines=True)
    whole, torn = path.read_text().splitlines()
    path.write_text(f"{whole}\n{torn[:-40]}")
    assert {line["extra"]["request_id"] for line in read_lines(path)} == {"t1"}


def test_ours_come_back_as_they_went(tmp_path):
    make(tmp_path / "run", seed=5, steps=2, requests=24, turns=2, slower={1: 2.5})
    files = find_log_files(tmp_path / "run")
    spans = write_otlp(files, tmp_path / "out.jsonl")
    assert spans == write_as_log(tmp_path / "out.jsonl", tmp_path / "again")
    there, back = (summarise(analysis(tmp_path / name)) for name in ("run", "again"))
    assert {**there, "input": None} == {**back, "input": None}


def test_ours_are_spans_that_any_viewer_reads(tmp_path):
    make(tmp_path / "run", seed=5, steps=1, requests=24)
    write_otlp(find_log_files(tmp_path / "run"), tmp_path / "out.jsonl")
    batches = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    spans = [it for batch in batches for one in batch["resourceSpans"] for scope in one["scopeSpans"] for it in scope["spans"]]
    identities = {it["spanId"] for it in spans}
    assert len(identities) == len(spans) and all(len(it["traceId"]) == 32 and len(it["spanId"]) == 16 for it in spans)
    children = [it for it in spans if it["name"] == "turn_engine_call"]
    assert len(children) == 24 and all(it["parentSpanId"] in identities for it in children)
    assert all(int(it["startTimeUnixNano"]) <= int(it["endTimeUnixNano"]) for it in spans)


def of(span, line=None):
    """One span with some keys changed, or taken away; with a line of a log."""
    whole = {"traceId": "t", "name": "n", "startTimeUnixNano": "1", "endTimeUnixNano": "2", **span}
    about = [] if line is None else [{"key": "mux.line", "value": line}]
    kept = {key: value for key, value in whole.items() if value is not None}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{**kept, "attributes": about}]}]}]}


@pytest.mark.parametrize("role", ["../out", "/tmp/out", "", None])
def test_a_line_of_a_log_in_a_span_leads_out_of_no_folder(tmp_path, role):
    line = {"timestamp": "2025-08-11T00:00:00", "event": "step", "role": role, "step": 1, "workid": 0}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(of({}, {"stringValue": json.dumps(line)})))
    with pytest.raises(UserError, match="an attribute mux.line is no line of an event log"):
        write_as_log(path, tmp_path / "log")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", '{"spans": []}', '{"resourceSpans": []}', '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}'),
        *("[" * 100_000, "null", '{"resourceSpans": null}'),
        *(
            json.dumps(spans)
            for spans in (
                of({"traceId": None}),
                of({"name": None}),
                of({"endTimeUnixNano": "9" * 30}),
                of({"endTimeUnixNano": "soon"}),
                of({}, {"stringValue": "[1]"}),
                of({}, {"stringValue": "{"}),
                of({}, {"intValue": "3"}),
            )
        ),
    ],
)
def test_what_is_no_otlp_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.json (is no OTLP JSON|holds no event log)"):
        write_as_log(path, tmp_path / "log")
