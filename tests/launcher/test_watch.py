import io

import pytest
from rich.console import Console

from verl_mux.launcher.watch import plain_lines, tables


def job(**changes) -> dict:
    plain = {"state": "live", "steps_done": 0, "steps": 20, "metrics": {}, "waiting": [], "note": "", "progress": None}
    return {**plain, **changes}


def node(**changes) -> dict:
    return {"holders": [], "queue": [], "bytes": 0, "peak_bytes": 0, **changes}


def snapshot(jobs: dict, **nodes: dict) -> dict:
    pools = {name: {"nodes": {f"{name}0": state}} for name, state in nodes.items()}
    return {"segment": {"mode": "interleaved"}, "pools": pools, "jobs": jobs}


HOLDS = {"job": "math", "phase": "rollout", "step": 3, "held_s": 2.0, "note": "generate"}


def lines(state: dict, at: float = 12.3, said: dict | None = None) -> list[str]:
    return list(plain_lines(state, at, {} if said is None else said))


def test_a_line_says_step_reward_and_what_the_job_does():
    state = snapshot({"math": job(steps_done=2, metrics={"reward": 0.51239})}, rollout=node(holders=[HOLDS]))
    assert lines(state) == ["[  12.3 s] math: step 2, reward 0.512 (rollout on rollout0)"]


@pytest.mark.parametrize(
    ("changes", "doing"),
    [({"waiting": ["train"]}, "waits for train"), ({"note": "old_log_prob"}, "old_log_prob"), ({}, "live")],
)
def test_without_a_lease_it_says_what_the_job_waits_for_or_last_did(changes, doing):
    assert lines(snapshot({"math": job(**changes)})) == [f"[  12.3 s] math: step 0 ({doing})"]


def test_what_was_said_and_a_job_that_only_asked_whether_it_may_come_are_no_lines():
    said: dict[str, str] = {}
    state = snapshot({"math": job(steps_done=1), "code": job(), "asked": job(state="ended")})
    assert len(lines(state, said=said)) == 2 and lines(state, 20.0, said) == [] == lines({}, 20.0, said)
    later = snapshot({"math": job(steps_done=2), "code": job()})
    assert lines(later, 21.0, said) == ["[  21.0 s] math: step 2 (live)"]


WHOLE = {"address": "tcp://c", "started": True, "settling_s": None, "journal": {"path": None, "blocked": None, "lost": None}}


def drawn(state: dict) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(tables(state, 61.0, 3 << 30))
    return console.file.getvalue()


def test_a_terminal_shows_time_memory_and_the_tables_of_the_status():
    usage = {"host_memory": {"held": 0, "capacity": None}, "usage": {"bubble_filled": None, "fillers_s": 0.0}}
    holder = HOLDS | {"state": "held", "overdue": False, "filler": False}
    of_job = {"filler": False, "reason": "", "waits_for": [], "step": 3}
    state = snapshot({"math": job(**of_job)}, rollout=node(holders=[holder], **usage)) | WHOLE
    text = drawn(state | {"segment": {"mode": "interleaved", "index": 0, "of": 1}})
    for part in ("61 s", "interleaved", "3.0 GiB", "math rollout 3 [generate] for 2.0 s", "step 3 of 20"):
        assert part in text, part
    assert "starting" in drawn({})
