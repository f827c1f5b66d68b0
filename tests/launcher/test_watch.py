import io

import pytest
from rich.console import Console

from verl_mux.launcher.watch import LiveView


def job(**changes) -> dict:
    plain = {"state": "live", "steps_done": 0, "steps": 20, "metrics": {}, "waiting": [], "note": "", "progress": None}
    return {**plain, **changes}


def node(**changes) -> dict:
    return {"holders": [], "queue": [], "bytes": 0, "peak_bytes": 0, **changes}


def snapshot(jobs: dict, **nodes: dict) -> dict:
    pools = {name: {"nodes": {f"{name}0": state}} for name, state in nodes.items()}
    return {"segment": {"mode": "interleaved"}, "pools": pools, "jobs": jobs}


HOLDS = {"job": "math", "phase": "rollout", "step": 3, "held_s": 2.0, "note": "generate"}


@pytest.fixture
def view() -> LiveView:
    return LiveView(["math", "code"])


def lines(view: LiveView, state: dict, at: float = 12.3) -> list[str]:
    view.update(state)
    return list(view.plain_lines(at))


class TestPlainLines:
    def test_a_line_says_step_reward_and_what_the_job_does(self, view):
        state = snapshot({"math": job(steps_done=2, metrics={"reward": 0.51239})}, rollout=node(holders=[HOLDS]))
        assert lines(view, state) == ["[  12.3 s] math: step 2, reward 0.512 (rollout on rollout0)"]

    @pytest.mark.parametrize(
        ("changes", "doing"),
        [({"waiting": ["train"]}, "waits for train"), ({"note": "old_log_prob"}, "old_log_prob"), ({}, "live")],
    )
    def test_without_a_lease_it_says_what_the_job_waits_for_or_last_did(self, view, changes, doing):
        assert lines(view, snapshot({"math": job(**changes)})) == [f"[  12.3 s] math: step 0 ({doing})"]

    def test_nothing_new_is_no_line(self, view):
        state = snapshot({"math": job(steps_done=1), "code": job()})
        assert len(lines(view, state)) == 2
        assert lines(view, state, 20.0) == []
        assert lines(view, snapshot({"math": job(steps_done=2), "code": job()}), 21.0) == ["[  21.0 s] math: step 2 (live)"]

    def test_a_job_that_only_asked_whether_it_may_come_is_no_line(self, view):
        assert lines(view, snapshot({"math": job(state="ended")})) == []

    def test_before_the_first_snapshot_there_is_nothing(self, view):
        assert list(view.plain_lines(0.0)) == []


WHOLE = {"address": "tcp://c", "started": True, "settling_s": None, "journal": {"path": None, "blocked": None, "lost": None}}


def whole_node(**changes) -> dict:
    usage = {"bubble_filled": None, "fillers_s": 0.0}
    return node(host_memory={"held": 0, "capacity": None}, usage=usage, **changes)


class TestRender:
    def drawn(self, view: LiveView) -> str:
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(view.render(61.0, 3 << 30))
        return console.file.getvalue()

    def update(self, view: LiveView, jobs: dict, **nodes: dict) -> None:
        state = snapshot(jobs, **nodes) | WHOLE
        view.update(state | {"segment": {"mode": "interleaved", "index": 0, "of": 1}})

    def test_it_shows_holders_queues_memory_steps_and_rewards(self, view):
        queue = [{"job": "code", "phase": "rollout", "step": 3, "waited_s": 1.4, "held_back": None}]
        holder = HOLDS | {"state": "held", "overdue": False, "filler": False}
        busy = whole_node(holders=[holder], queue=queue, bytes=5 << 20, peak_bytes=9 << 20)
        common = {"filler": False, "reason": "", "waits_for": []}
        metrics = {"reward": 0.5, "response_length": 81.2}
        jobs = {
            "math": job(step=3, metrics=metrics, progress=[3, 64], note="generate", **common),
            "code": job(step=0, steps=None, note="starting engines", **common),
        }
        self.update(view, jobs, rollout=busy, train=whole_node())
        text = self.drawn(view)
        for part in (
            "61 s", "interleaved", "3.0 GiB", "math rollout 3 [generate] for 2.0 s", "code rollout 3 since 1.4 s",
            "5 MiB, peak 9 MiB", "step 3 of 20", "reward=0.5", "response_length=81.2", "3/64 samples",
            "live (starting engines)", "step 0",
        ):  # fmt: skip
            assert part in text, part

    def test_it_draws_before_anything_is_known(self, view):
        assert "starting" in self.drawn(view)

    def test_a_lane_keeps_the_last_minute(self, view):
        held = whole_node(holders=[HOLDS | {"state": "held", "overdue": False, "filler": False}])
        for _ in range(70):
            self.update(view, {}, rollout=held)
        self.update(view, {}, rollout=whole_node())
        text = self.drawn(view)
        assert text.count("█") == 59 and text.count("·") == 1
