"""Files of other programs: what each is shows in its content, and a fault in it is named."""

import json
import random
from datetime import datetime, timedelta

import pytest

from tests.profiling.made_logs import read_run
from verl_mux.errors import UserError
from verl_mux.profiling.report.formats.foreign import write_as_log
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise

BEGAN = datetime(2026, 3, 2, 9)


def report(source, folder):
    write_as_log(source, folder)
    return summarise(Analysis(read_run(folder)))


def metrics(step: int, gen: float = 30.0, sync: float = 1.0) -> dict:
    rng = random.Random(step)
    timed = {"gen": gen, "reward": 0.5, "old_log_prob": 4.0, "update_actor": 12.0, "update_weights": sync}
    figures = {f"timing_s/{part}": seconds * rng.uniform(0.97, 1.03) for part, seconds in timed.items()}
    whole = {"timing_s/step": sum(figures.values()), "timing_s/agent_loop/num_preempted/mean": 0.0}
    return {"training/global_step": step, "critic/score/mean": 0.5, **figures, **whole}


def console(steps) -> str:
    def line(number, figures):
        return f"(TaskRunner pid=77) step:{number} - " + " - ".join(f"{key}:{value!r}" for key, value in figures.items())

    return "\n".join(
        ["Training Progress:  10%|#", *(line(n, figures) for n, figures in enumerate(steps, 1)), "(TaskRunner) step:7 - torn"]
    )


def wandb(steps) -> str:
    rows = [json.dumps({**figures, "_step": n, "_timestamp": 1.77e9 + 50 * n}) for n, figures in enumerate(steps, 1)]
    return "\n".join(rows)[:-20]  # the last line is torn


STEPS = [metrics(n, sync=25.0 if n == 4 else 1.0) for n in range(1, 8)]


@pytest.mark.parametrize(("name", "text", "steps"), [("a.log", console(STEPS), 7), ("history.jsonl", wandb(STEPS), 6)])
def test_verls_metrics_say_which_part_of_which_step_was_slow(tmp_path, name, text, steps):
    (tmp_path / name).write_text(text)
    reported = report(tmp_path / name, tmp_path / "log")
    assert reported["steps"] == steps and reported["event_share"]["generate"] > 50
    (slow,) = reported["findings"]
    assert (slow["kind"], slow["step"], slow["evidence"]["event"]) == ("slow_phase", 4, "sync")
    assert "requests" in {row["what"] for row in reported["input"]["missing"]}


def test_a_slow_rollout_is_named_where_no_requests_are_known(tmp_path):
    (tmp_path / "a.log").write_text(console([metrics(n, gen=120.0 if n == 5 else 30.0) for n in range(1, 8)]))
    (slow,) = report(tmp_path / "a.log", tmp_path / "log")["findings"]
    assert (slow["step"], slow["evidence"]["event"]) == (5, "generate")


def sglang(folder, form: str, slower: int | None = None):
    """Four servers' logs of five steps."""
    rng = random.Random(0)
    for replica in range(4):
        rows = []
        for step in range(5):
            for number in range(16):
                tokens = int(rng.lognormvariate(6, 0.35))
                seconds = tokens * 0.02 * (2.5 if replica == slower else 1.0)
                end = BEGAN + timedelta(seconds=200 * step + seconds)
                meta = {"id": f"{step}{replica}{number:02}", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 90}
                meta |= {"completion_tokens": tokens, "cached_tokens": 0, "e2e_latency": seconds}
                if form == "json":
                    line = {
                        "timestamp": end.isoformat(),
                        "event": "request.finished",
                        "rid": meta["id"],
                        "obj": {},
                        "out": {"meta_info": meta},
                    }
                    rows.append(json.dumps(line))
                else:
                    out = {"text": "it's, out={", "meta_info": meta}
                    rows.append(f"[{end:%Y-%m-%d %H:%M:%S} TP0] Finish: obj=GenerateReqInput(rid='x', stream=False), out={out}")
        rng.shuffle(rows)
        (folder / f"server{replica}.log").write_text(
            "[2026-03-02 09:00:00] Receive: obj=1\n" + "\n".join(rows) + '\n{"event": "request.fin'
        )
    return folder


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("slower", [None, 2])
def test_sglangs_request_logs_name_the_slow_server(tmp_path, form, slower):
    (tmp_path / "logs").mkdir()
    reported = report(sglang(tmp_path / "logs", form, slower), tmp_path / "log")
    assert (reported["steps"], reported["requests"]) == (5, 320)
    found = [(it["kind"], it["replica"], it["node"]) for it in reported["findings"]]
    assert found == ([("straggler", 2, "server2")] if slower else [])


def test_a_task_of_rays_timeline_that_is_slow_on_one_worker_is_named(tmp_path):
    rows = []
    for step in range(6):
        for rank in range(4):
            dur = 12e6 * (2.2 if rank == 3 else 1.0) + rank * 1e4
            task = {
                "cat": "task::WorkerDict.actor_rollout_update_actor",
                "name": "task",
                "pid": "10.0.0.1",
                "tid": f"worker:{rank}",
            }
            rows.append({**task, "ts": step * 60e6, "dur": dur, "ph": "X", "args": {}})
            rows.append({**task, "cat": "task:deserialize_arguments", "ts": step * 60e6, "dur": 1e3, "ph": "X", "args": {}})
    (tmp_path / "t.json").write_text(json.dumps(rows))
    (slow,) = report(tmp_path / "t.json", tmp_path / "log")["findings"]
    assert (slow["kind"], slow["worker"], slow["evidence"]["steps"]) == ("slow_phase", 3, [1, 2, 3, 4, 5, 6])


def test_several_kinds_in_one_folder_and_file(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    sglang(logs, "text")
    first = logs / "server0.log"
    first.write_text(first.read_text() + console(STEPS))
    reported = report(logs, tmp_path / "log")
    assert reported["requests"] == 320 and "slow_phase" in {it["kind"] for it in reported["findings"]}


@pytest.mark.parametrize("content", [b"nothing of the kind\n", b"", b"\0\1\2", b'{"a": 1}\n', b'[{"ph": "X"}]'])
def test_what_is_of_no_kind_is_refused_with_what_is_allowed(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="nothing to report; give a directory of event logs, or files of OTLP"):
        write_as_log(tmp_path / "x", tmp_path / "log")
