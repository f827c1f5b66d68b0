"""Logs in the layout that docs/event_log.md describes, as another program might write them: no `run`, `stay` only on request,
and of the other events only those that are asked for. One job without a name, eight agent loop workers, four replicas on two
nodes.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

EPOCH = datetime(2026, 3, 2, 9, 0, 0)
PACE = 0.02  # seconds a token


@dataclass
class Documented:
    """slow: (replica, steps) -> factor of its time per token. stall: (step, replicas, seconds after the step's start, seconds).
    tool: seconds of a call by (step, prompt); `tools`: part of the requests that call `search` besides, of 1 s.
    carried: part of a step's requests that are cut off and go on in the next. events: which optional ones are written.
    train: seconds by trainer event; train_at: the same of one step. shift: seconds that a role's or worker's clock is off.
    """

    seed: int = 0
    stay: bool = False
    steps: int = 6
    workers: int = 8
    replicas: int = 4
    prompts: int = 32
    samples: int = 4
    sigma: float = 0.35
    carried: float = 0.0
    reward: float = 0.05
    tools: float = 0.0
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    stall: tuple[int, tuple[int, ...], float, float] | None = None
    tool: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    slow_tool: dict[tuple[int, str], float] = field(default_factory=dict)
    rewards: dict[Any, float] = field(default_factory=dict)  # step, or (step, request), or ("worker", w): seconds
    prepare: dict[Any, float] = field(default_factory=dict)
    finalize: dict[Any, float] = field(default_factory=dict)
    queue: dict[tuple[int, int], float] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)  # replica -> weight of being chosen
    long: dict[tuple[int, int], float] = field(default_factory=dict)  # (step, request) -> seconds of its answer
    engine: dict[tuple[int, int], float] = field(default_factory=dict)  # (step, request) -> seconds more in its engine
    unexplained: dict[Any, float] = field(default_factory=dict)
    trainer: dict[str, float] = field(default_factory=lambda: {"sync": 1.0, "old_log_prob": 4.0, "update_actor": 12.0})
    trainer_at: dict[tuple[int, str], float] = field(default_factory=dict)
    ranks: int = 1
    rank_slower: dict[tuple[int, str], float] = field(default_factory=dict)
    shift: dict[tuple[str, int], float] = field(default_factory=dict)
    way: dict[int, float] = field(default_factory=dict)  # replica -> seconds on the way to it
    cancelled: dict[int, float] = field(default_factory=dict)  # step -> part of its requests that are given up
    retracted: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (step, replica) -> times that each of its stays is thrown out
    without: tuple[str, ...] = ()  # events or keys of extra that are not written
    job: str = ""

    def write(self, folder: Path) -> Path:
        self.rng, self.files = random.Random(self.seed), defaultdict(list)
        self.left: list[dict[str, Any]] = []
        at = 0.0
        for step in range(1, self.steps + 1):
            at = self._trainer(step, self._rollout(step, at)) + 0.5
        for (role, step, worker), lines in self.files.items():
            path = folder / role / f"step_{step}" / f"worker_{worker}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line + "\n" for _, line in sorted(lines)))
        return folder

    def _log(self, role: str, worker: int, step: int, end: float, event: str, seconds: float | None, **extra: Any) -> None:
        if event in self.without:
            return
        off = self.shift.get((role, worker), 0.0)
        line: dict[str, Any] = {"timestamp": (EPOCH + timedelta(seconds=end + off)).isoformat(timespec="microseconds")}
        line["event"] = event
        line |= {} if seconds is None else {"duration_sec": round(seconds, 6)}
        line["extra"] = {key: value for key, value in extra.items() if key not in self.without and value is not None}
        line |= {"workid": worker, "step": step, "role": role} | ({"job": self.job} if self.job else {})
        self.files[role, step, worker].append((end, json.dumps(line)))

    def _of(self, table: dict[Any, float], step: int, request: int, worker: int) -> float:
        return sum(table.get(key, 0.0) for key in (step, (step, request), ("worker", worker), (step, "worker", worker)))

    def _rollout(self, step: int, began: float) -> float:
        rng = self.rng
        fresh = [self._fresh(step, number) for number in range(self.prompts * self.samples)]
        keep = int(len(fresh) * self.carried) if step < self.steps else 0
        ends = sorted(self._run(step, request, began) for request in [*self.left, *fresh])
        every = [*self.left, *fresh]
        cut = ends[len(ends) - keep - 1] if keep else float("inf")
        self.left = []
        for request in every:
            if request["end"] > cut:
                self.left.append(request)
            self._settle(step, request, cut)
        rng.random()
        return min(max(ends), cut)

    def _fresh(self, step: int, number: int) -> dict[str, Any]:
        seconds = self.long.get((step, number), min(self.rng.lognormvariate(2.2, self.sigma), 40.0))
        prompt = number // self.samples
        weights = [self.share.get(replica, 1.0) for replica in range(self.replicas)]
        replica = number % self.replicas if not self.share else self.rng.choices(range(self.replicas), weights)[0]
        tool = self.tool.get((step, prompt))
        if tool is None and self.rng.random() < self.tools:
            tool = ("search", self.rng.lognormvariate(0.0, 0.3) * self.slow_tool.get((step, "search"), 1.0))
        return {
            "name": f"{step:02}{prompt:04}ab_{number % self.samples}", "number": number, "worker": number % self.workers,
            "tokens": max(int(seconds / PACE), 8), "replica": replica, "tool": tool, "stay": 0, "turn": 1, "first": None,
        }  # fmt: skip

    def _run(self, step: int, request: dict[str, Any], began: float) -> float:
        """Plan the request's life from `began` on; its end if nothing cuts it off."""
        at = began + self.rng.uniform(0.0, 0.3)
        fresh, request["began"] = request["first"] is None, at
        request["first"] = at if fresh else request["first"]
        request["parked"] = None if fresh else at - request["since"]
        number, worker, replica = request["number"], request["worker"], request["replica"]
        prepare = 0.01 + (self._of(self.prepare, step, number, worker) if fresh else 0.0)
        queue = self.queue.get((step, replica), 0.0) * self.rng.uniform(0.5, 1.5)
        work = request["tokens"] * PACE * self.rng.uniform(0.95, 1.05) * self.slow.get((replica, step), 1.0)
        work += self.engine.get((step, number), 0.0)
        start = at + prepare
        end = start + queue + work + self.way.get(replica, 0.0)
        if self.stall and step == self.stall[0] and replica in self.stall[1]:
            stop = began + self.stall[2]
            if start < stop + self.stall[3] and end > stop:
                end += stop + self.stall[3] - max(stop, start)
        request |= {"call": start, "queue": queue, "engine": end}
        tool = request["tool"][1] if request["tool"] else 0.0
        reward = self.reward * self.rng.uniform(0.5, 1.5) + self._of(self.rewards, step, number, worker)
        finalize = 0.002 + self._of(self.finalize, step, number, worker)
        silent = self._of(self.unexplained, step, number, worker)
        request |= {"tooled": end + tool, "rewarded": end + tool + reward, "final": end + tool + reward + finalize}
        request["end"] = request["final"] + silent + 0.001
        return request["end"]

    def _settle(self, step: int, it: dict[str, Any], cut: float) -> None:
        worker, who = it["worker"], {"request_id": it["name"]}
        if it["began"] == it["first"]:
            self._log(
                "rollout", worker, step, it["began"], "request_start", None, **who, batch_data_id=it["name"][:6], validate=False
            )
            self._log("rollout", worker, step, it["call"], "turn_pre_process", it["call"] - it["began"], **who, turn=1)
        else:
            self._log("rollout", worker, step, it["began"], "request_requeued", None, **who)
            self._log("rollout", worker, step, it["began"], "request_parked", it["parked"], **who, reason="cut off")
        it["stay"] += 1
        stop = min(it["engine"], cut)
        part = (
            it["tokens"]
            if stop == it["engine"]
            else max(int(it["tokens"] * (stop - it["call"]) / (it["engine"] - it["call"])), 0)
        )
        reason = "stop" if stop == it["engine"] else "abort"
        where = {"turn": 1, "replica": it["replica"], "node": f"r{it['replica'] * 2 // self.replicas}"}
        where |= {"stay": it["stay"] if self.stay else None, "queue_sec": round(min(it["queue"], stop - it["call"]), 6) or None}
        where |= {"prompt_tokens": 100, "response_tokens": part}
        self._log("rollout", worker, step, stop, "turn_engine_call", stop - it["call"], **who, **where, finish_reason=reason)
        own = max(stop - it["call"] - 0.004 - self.way.get(it["replica"], 0.0), 0.0)
        thrown = self.retracted.get((step, it["replica"]))
        self._log(
            "server", it["replica"], step, stop - 0.002, "engine_generate", own, **who, **where, finish=reason, retractions=thrown
        )
        if it["queue"]:
            waited = min(it["queue"], own)
            self._log("server", it["replica"], step, it["call"] + waited, "engine_queue", waited, **who, **where)
        if it["end"] > cut:
            it["since"], it["tokens"] = cut, max(it["tokens"] - part, 8)
            self._log("rollout", worker, step, cut, "aborted_request_with_cancelled_error", None, **who, reason="cut off")
            return
        if self.rng.random() < self.cancelled.get(step, 0.0):
            gone = {"reason": "cancelled"}
            self._log("rollout", worker, step, stop, "aborted_request_with_cancelled_error", stop - it["first"], **who, **gone)
            return
        if it["tool"]:
            self._log("rollout", worker, step, it["tooled"], "tool_execution", it["tool"][1], **who, turn=1, tool=it["tool"][0])
        self._log("rollout", worker, step, it["rewarded"], "reward_calculation", it["rewarded"] - it["tooled"], **who, score=0.5)
        self._log("rollout", worker, step, it["final"], "finalization", it["final"] - it["rewarded"], **who)
        whole = {"batch_data_id": it["name"][:6], "finish_reason": "stop", "turns": 1, "stays": it["stay"] if self.stay else None}
        self._log("rollout", worker, step, it["end"], "async_rollout_request_complete", it["end"] - it["first"], **who, **whole)

    def _trainer(self, step: int, at: float) -> float:
        began = at
        for event, usual in self.trainer.items():
            seconds = self.trainer_at.get((step, event), usual) * self.rng.uniform(0.93, 1.07)
            ends = []
            for rank in range(self.ranks):
                own = seconds * self.rng.uniform(0.98, 1.02) * self.rank_slower.get((rank, event), 1.0)
                self._log("trainer", rank, step, at + own, event, own)
                ends.append(at + own)
            at = max(ends)
        self._log("trainer", 0, step, at, "step", at - began + 20.0)
        return at
