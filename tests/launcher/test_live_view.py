import io

import pytest
from rich.console import Console

from verl_mux.launcher.live_view import LiveView


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


class TestRender:
    def drawn(self, view: LiveView) -> str:
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(view.render(61.0, 3 << 30))
        return console.file.getvalue()

    def test_it_shows_holders_queues_memory_steps_and_rewards(self, view):
        queue = [{"job": "code", "phase": "rollout", "waited_s": 1.4}]
        busy = node(holders=[HOLDS], queue=queue, bytes=5 << 20, peak_bytes=9 << 20)
        jobs = {
            "math": job(steps_done=2, metrics={"reward": 0.5, "response_length": 81.2}, progress=[3, 64], note="generate"),
            "code": job(steps=None),
        }
        view.update(snapshot(jobs, rollout=busy, train=node()))
        text = self.drawn(view)
        for part in (
            "61 s", "interleaved", "3.0 GiB", "math rollout 2 s (generate)", "code 1 s", "5 MiB (peak 9)", "2/20", "0.500",
            "81 tokens", "generate 3/64 samples", "0/?",
        ):  # fmt: skip
            assert part in text, part

    def test_it_draws_before_anything_is_known(self, view):
        assert "starting" in self.drawn(view)

    def test_a_lane_keeps_the_last_minute(self, view):
        for _ in range(70):
            view.update(snapshot({}, rollout=node(holders=[HOLDS])))
        view.update(snapshot({}, rollout=node()))
        text = self.drawn(view)
        assert text.count("█") == 59 and text.count("·") == 1
