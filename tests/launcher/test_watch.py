import io

import pytest
from rich.console import Console

from verl_mux.launcher.watch import Progress


def job(**changes) -> dict:
    plain = {
        "state": "live",
        "step": 0,
        "steps_done": 0,
        "steps": 20,
        "reason": "",
        "waits_for": [],
        "metrics": {},
        "waiting": [],
        "note": "",
        "progress": None,
    }
    return {**plain, **changes}


def node(**changes) -> dict:
    return {"holders": [], "queue": [], "bytes": 0, "peak_bytes": 0, **changes}


def snapshot(jobs: dict, **nodes: dict) -> dict:
    pools = {name: {"nodes": {f"{name}0": state}} for name, state in nodes.items()}
    return {"segment": {"mode": "interleaved"}, "pools": pools, "jobs": jobs}


HOLDS = {"job": "math", "phase": "rollout", "step": 3, "held_s": 2.0, "note": "generate"}


def lines(state: dict, at: float = 12.3, progress: Progress | None = None) -> list[str]:
    return list((progress or Progress([])).lines(state, at))


def test_a_line_says_step_reward_and_what_the_job_does():
    state = snapshot({"math": job(steps_done=2, metrics={"reward": 0.51239})}, rollout=node(holders=[HOLDS]))
    assert lines(state) == ["[  12.3 s] math: step 2 of 20, reward 0.512 (rollout on rollout0)"]


@pytest.mark.parametrize(
    ("changes", "doing"),
    [({"waiting": ["train"]}, "waits for train"), ({"note": "old_log_prob"}, "old_log_prob"), ({}, "live")],
)
def test_without_a_lease_it_says_what_the_job_waits_for_or_last_did(changes, doing):
    assert lines(snapshot({"math": job(steps_done=1, step=2, **changes)})) == [f"[  12.3 s] math: step 1 of 20 ({doing})"]


def test_a_job_that_starts_says_its_stage_and_for_how_long():
    progress = Progress(["math"])
    stages = [
        ({}, "importing"),
        ({"math": job(state="ended")}, "starting Ray"),
        ({"math": job(note="starting workers", note_s=3.4)}, "starting workers (3 s)"),
        ({"math": job(note="sync", note_s=0.2)}, "first weights (0 s)"),
    ]
    for at, (jobs, said) in enumerate(stages):
        assert lines(snapshot(jobs), at, progress) == [f"[{at:6.1f} s] math: {said}"]


def test_after_eight_seconds_without_a_line_one_says_what_every_job_does():
    progress = Progress(["math", "code"])
    state = snapshot({"math": job(note="starting workers", note_s=1.0), "code": job(steps_done=3, step=4)})
    assert len(lines(state, 5.0, progress)) == 2
    state["jobs"]["math"]["note_s"] = 10.0
    assert lines(state, 12.9, progress) == []
    assert lines(state, 13.0, progress) == ["[  13.0 s] math: starting workers (10 s); code: step 3 of 20 (live)"]
    assert lines(state, 15.0, progress) == []
    assert list(progress.lines(state, 40.0, ended={"math", "code"})) == []


@pytest.mark.parametrize(("at", "left"), [(10.0, "about 3 min left"), (4.0, "about 72 s left")])
def test_an_estimate_of_the_time_that_is_left_follows_from_the_steps_that_were_seen(at, left):
    progress = Progress([])
    assert lines(snapshot({"math": job(steps_done=1, step=2)}), 0.0, progress) == ["[   0.0 s] math: step 1 of 20 (live)"]
    assert lines(snapshot({"math": job(steps_done=2, step=3)}), at, progress) == [
        f"[{at:6.1f} s] math: step 2 of 20 (live, {left})"
    ]
    assert "left" not in lines(snapshot({"math": job(steps_done=20, step=20)}), 99.0, progress)[0]


WHOLE = {"address": "tcp://c", "started": True, "settling_s": None, "journal": {"path": None, "blocked": None, "lost": None}}


def drawn(state: dict) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(Progress(["math"]).tables(state, 61.0, 3 << 30))
    return console.file.getvalue()


def test_a_terminal_shows_time_memory_and_the_tables_of_the_status():
    usage = {"host_memory": {"held": 0, "capacity": None}, "usage": {"bubble_filled": None, "fillers_s": 0.0}}
    holder = HOLDS | {"state": "held", "overdue": False, "filler": False}
    of_job = {"filler": False, "reason": "", "waits_for": [], "step": 3}
    state = snapshot({"math": job(**of_job)}, rollout=node(holders=[holder], **usage)) | WHOLE
    text = drawn(state | {"segment": {"mode": "interleaved", "index": 0, "of": 1}})
    for part in ("61 s", "interleaved", "3.0 GiB", "math rollout 3 [generate] for 2.0 s", "step 3 of 20"):
        assert part in text, part
    assert "math: importing" in drawn({})
