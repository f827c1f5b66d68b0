"""One job: its prompts, its agent loops, its steps."""

from __future__ import annotations

import math
import random

from tests.profiling.blind.engine import Engine, Stay, Timers
from tests.profiling.blind.log import Cluster, Lines
from tests.profiling.blind.request import Group, Request
from tests.profiling.blind.shapes import Run

WORKERS = 8


class Job:
    """One job's steps: a generator that asks for nodes and is sent the time at which it has them."""

    def __init__(self, run: Run, name: str, lines: Lines, cluster: Cluster) -> None:
        self.run, self.name, self.lines, self.cluster = run, name, lines, cluster
        self.rng = random.Random(f"{run.seed} {name} phases")
        nodes = [f"r{i}" for i in range(run.nodes)]
        self.nodes = nodes[run.nodes // 2 :] if run.mode == "migrated" and name == "b" else nodes
        self.batch = run.prompts if len(self.nodes) == run.nodes else max(4, run.prompts // 2)
        self.mux = run.mode != "async"
        self.clock = Timers()
        self.engines = [
            Engine(self, i, node, run.fixed_s * self.rng.gauss(1, 0.03), run.each_s, run.slots, run.kv_tokens)
            for i, node in enumerate(node for node in self.nodes for _ in range(run.on_node))
        ]
        self.groups: list[Group] = []
        self.drawn = self.tokens_of_step = 0
        self.at = self.waited = 0.0
        self.under_way = 1.5
        self.settled = True  # a request ended or was parked

    def trainer(self, step: int, event: str, took: float | None = None, **extra) -> None:
        self.lines.say(self.name, "trainer", 0, step, self.at, event, took, **extra)

    def noisy(self, seconds: float, step: int) -> float:
        now_and_then = self.rng.uniform(1.2, 1.6) if self.rng.random() < 0.03 else 1.0
        return seconds * now_and_then * self.rng.lognormvariate(0, 0.06) * (self.rng.uniform(1.2, 2.2) if step == 1 else 1.0)

    def part(self, step: int, event: str, seconds: float, **extra) -> None:
        self.at += (seconds := self.noisy(seconds, step))
        self.trainer(step, event, seconds, **extra)

    # ------------------------------------------------------------ prompts

    def new_group(self, step: int, validate: bool = False) -> Group:
        run, name = self.run, f"{self.run.seed:x}-{self.name}-{'v' if validate else 'p'}{self.drawn}"
        rng, at, self.drawn = random.Random(name), self.drawn, self.drawn + 1
        mean = run.mean_tokens * run.drift ** (step / run.steps) * rng.lognormvariate(0, run.spread)
        prompt = rng.randint(60, 900)
        return Group([
            self._new_request(rng, f"{name}_{i}", (at * WORKERS // self.batch) % WORKERS, step, prompt, mean, validate)
            for i in range(1 if validate else run.samples)
        ])  # fmt: skip

    def _new_request(self, rng, name: str, worker: int, step: int, prompt: int, mean: float, validate: bool) -> Request:
        run = self.run
        length = min(run.longest, max(8, round(mean * rng.lognormvariate(0, run.spread))))
        calls = min(5, int(rng.expovariate(0.5))) if run.tools else 0
        turns: list[tuple[int, str | None, float]] = []
        for _ in range(calls):
            tool, median = rng.choice(run.tools)
            turns.append((max(4, length // (calls + 1)), tool, min(30.0, median * rng.lognormvariate(0, 0.7))))
        turns.append((max(4, length // (calls + 1)), None, 0.0))
        request = Request(name, worker, step, prompt, turns, run.reward_s * rng.lognormvariate(0, 0.4), validate)
        request.life = self._life(request)
        return request

    # ------------------------------------------------------------ an agent loop

    def _life(self, it: Request):
        """Yields seconds to sleep, a Stay to take in an engine, or None to be parked; is sent the time."""
        now = began = yield 0.0

        def say(event: str, took: float | None = None, /, **extra) -> None:
            self.lines.say(self.name, "rollout", it.worker, it.step, now, event, took, request_id=it.id, **extra)

        about = {"batch_data_id": it.id.split("_")[0][-2:], "session": int(it.id.split("_")[1]), "validate": it.validate}
        say("request_start", **about)
        context, idle, reason = it.prompt, now, "stop"
        for turn, (tokens, tool, tool_s) in enumerate(it.turns, 1):
            now = yield self.rng.uniform(0.01, 0.06)
            say("turn_pre_process", now - idle, turn=turn)
            got = 0
            while got < tokens and reason == "stop":
                if not it.open or it.budget == 0:
                    since, it.parked, self.settled = now, True, True
                    now = yield None
                    it.parked, it.parked_s = False, it.parked_s + now - since
                    say("request_parked", now - since, turn=turn, reason=it.held_by)
                it.stays += 1
                most = tokens - got if it.budget is None else min(tokens - got, it.budget)
                it.stay, since = Stay(it.id, it.step, turn, it.stays, context + got, most, now), now
                now = yield it.stay
                stay, it.stay = it.stay, None
                got, it.tokens = got + stay.done, it.tokens + stay.done
                it.budget = None if it.budget is None else it.budget - stay.done
                cut = self.run.longest <= it.tokens and tool is None
                finish = "abort" if stay.aborted else "length" if got < tokens or cut else "tool_calls" if tool else "stop"
                told = {"replica": stay.replica, "node": stay.node, "queue_sec": round(stay.queue_s, 6), "held_sec": 0.0}
                told = told if self.mux else dict.fromkeys(told)
                now += (late := self.rng.uniform(0.001, 0.01))
                say("turn_engine_call", now - since, turn=turn, stay=it.stays, prompt_tokens=stay.prompt,
                    response_tokens=stay.done, finish_reason=finish, **told,
                    version=it.step - 1 if self.mux else None)  # fmt: skip
                if stay.aborted and it.open:
                    say("request_migrated", 0.0, source=f"s{stay.replica}", target="other", tokens=got)
                elif stay.aborted:
                    say("aborted_request_with_cancelled_error", reason="cut off", response_length=it.tokens)
            idle, context = now, context + tokens
            if tool:
                slow = self.run.fault and self.run.fault.on("slow_tool", self.name, it.step) and self.run.fault.target == tool
                now = yield late + tool_s * (self.run.fault.strength if slow else 1.0)
                say("tool_execution", now - idle, turn=turn, tool=tool)
                idle, context = now, context + 120
        it.ending = True
        slow = self.run.fault and self.run.fault.on("slow_reward", self.name, it.step)
        now = yield it.reward_s * (self.run.fault.strength if slow else 1.0)
        score = float(random.Random(it.id).random() < 0.4)
        say("reward_calculation", now - idle, turn=len(it.turns), score=score)
        now = yield self.rng.uniform(0.01, 0.05)
        say("finalization", now - idle, turn=len(it.turns))
        say("async_rollout_request_complete", now - began, finish_reason="stop", **about, turns=len(it.turns), stays=it.stays,
            response_length=it.tokens, parked_sec=round(it.parked_s, 6), score=score)  # fmt: skip
        it.ended, self.settled, self.tokens_of_step = True, True, self.tokens_of_step + it.prompt + it.tokens

    def _go_on(self, it: Request, now: float) -> None:
        """The agent loop runs until it waits again."""
        try:
            wish = it.life.send(now)
        except StopIteration:
            return
        if isinstance(wish, Stay):
            there = [engine for engine in self.engines if engine.awake]
            if it.home not in there:
                it.home = min(there, key=lambda engine: (engine.in_flight, self.rng.random()))
            it.engine = it.home
            it.engine.enter(it, wish, now)
        elif wish is not None:
            self.clock.push(now + wish, it)

    def start(self, it: Request, step: int, now: float, budget: int | None = None) -> None:
        """Launch it, or let it go on."""
        fresh = it.tokens == 0 and it.stays == 0 and not it.parked
        it.step, it.open, it.budget = step, True, budget
        if fresh:
            next(it.life)
            self.clock.push(now + self.rng.uniform(0.0, 0.4), it)
        elif it.parked:
            self.lines.say(
                self.name, "rollout", it.worker, step, now, "request_requeued", 0.0, request_id=it.id, tokens=it.tokens
            )
            self._go_on(it, now)

    def until(self, over, limit: float = math.inf) -> None:
        """Run until `over()`, or that time: what happens next, agent loops' timers or engines, earliest first."""
        self.settled = True
        while not (self.settled and over()):
            self.settled = False
            engine = min(self.engines, key=Engine.next_at)
            if min(self.clock.next_at(), engine.next_at()) > limit:
                self.at = limit
                return
            if self.clock.next_at() <= engine.next_at():
                self.at, it = self.clock.pop()
                self._go_on(it, self.at)
            else:
                self.at = engine.next_at()
                for it in engine.happen(self.at):
                    self._go_on(it, self.at)

    def cut(self, requests: list[Request], reason: str) -> None:
        for it in requests:
            if not it.ended and not it.ending:
                it.open, it.held_by = False, reason
                if it.stay is not None and it.engine is not None:
                    it.engine.abort(it, self.at)
                    self._go_on(it, self.at)

    # ------------------------------------------------------------ a step's rollout

    def rollout(self, step: int, total: int) -> None:
        """Until the step has its groups; what is left over stays in self.groups."""
        began, mode = self.at, self.run.mode
        if mode == "segmented":
            done = self._rounds(step)
        else:
            size = -(-round((1 + self.run.rate) * self.batch * 100) // 100) if mode == "oversampled" else self.batch
            fresh = [self.new_group(step) for _ in range(max(0, size - len(self.groups)))]
            self.groups += fresh
            for it in [it for group in self.groups for it in group.requests if not it.ended]:
                self.start(it, step, self.at)
            self.until(self._enough if mode == "oversampled" else lambda: self._all(step))
            for group in [group for group in self.groups if not group.ended]:
                group.cuts += 1
            done = [group for group in self.groups if group.ended][: self.batch]
        self.groups = [group for group in self.groups if not any(group is one for one in done)]
        if mode in ("oversampled", "segmented", "migrated"):
            launched = (len(done) + len(self.groups)) * self.run.samples
            self.trainer(step, "async_rollout_with_monitoring_duration", self.at - began, total_requests=launched,
                         target_completion=self.batch * self.run.samples,
                         completed_count=len(done) * self.run.samples)  # fmt: skip

    def _enough(self) -> bool:
        complete = sum(group.ended for group in self.groups)
        protected = [group for group in self.groups if group.cuts >= 2 and not group.ended]
        if complete + len(protected) >= self.batch:
            self.cut([it for g in self.groups if not g.ended and g.cuts < 2 for it in g.requests if it.open], "cut off")
        ending = any(it.ending and not it.ended for group in self.groups for it in group.requests)
        return complete >= self.batch and not protected and not ending

    def _all(self, step: int) -> bool:
        requests = [it for group in self.groups for it in group.requests]
        done = sum(it.ended for it in requests)
        if self.run.mode == "migrated" and self.name == "a" and len(requests) > done >= 0.8 * len(requests):
            self._migrate(step)
        return done == len(requests)

    def _migrate(self, step: int) -> None:
        """Another job waits for some of the nodes: theirs go back, what runs there goes on elsewhere."""
        freed = [node for node in self.cluster.waited_for(self.at) if node in self.nodes]
        leaving = [engine for engine in self.engines if engine.node in freed and engine.awake]
        if not leaving:
            return
        for engine in leaving:
            engine.awake = False
        moved = [it for group in self.groups for it in group.requests if it.stay is not None and it.engine in leaving]
        for it in moved:
            it.engine.abort(it, self.at)
            self._go_on(it, self.at)
        self.at += 0.1
        self._move(step, "sleep", leaving)
        self.trainer(step, "phase", self.at - self.lease_began, phase="rollout", nodes=freed, token=self.token)
        self.trainer(step, "tail_migration", 0.3, nodes=freed, requests=len(moved), tokens=500 * len(moved), gain_sec=20.0)
        self.cluster.release(self, "rollout", freed, step, self.lease_began)

    def _rounds(self, step: int) -> list[Group]:
        """Rounds of one segment each, until enough groups are complete."""
        budget = max(32, int(self.run.mean_tokens * 1.2))
        while True:
            wanted = int(self.under_way * self.batch)
            self.groups += [self.new_group(step) for _ in range(max(0, wanted - len(self.groups)))]
            running = [it for group in self.groups for it in group.requests if not it.ended]
            for it in running:
                it.held_by = "budget"
                self.start(it, step, self.at, budget)
            self.until(lambda running=running: all(it.ended or it.parked for it in running))
            done = [group for group in self.groups if group.ended][: self.batch]
            if len(done) == self.batch:
                return done
            self.under_way = min(3.0, self.under_way + 0.25)

    # ------------------------------------------------------------ steps of our trainer

    def _move(self, step: int, verb: str, engines: list[Engine]) -> None:
        tags = ("weights", "kv_cache") if verb == "wake" else ("kv_cache", "weights")
        for tag in tags:
            for engine in engines:
                nbytes = 16_000_000_000 if tag == "weights" else 40_000_000_000
                self.lines.say(
                    self.name, "server", engine.replica, step, self.at, verb, self.rng.uniform(0.1, 0.2), tag=tag, bytes=nbytes,
                    mapped=nbytes * (verb == "wake"), node=engine.node, side="rollout",
                )  # fmt: skip
            self.at += 0.2

    def lease(self, step: int, phase: str):
        """Wait for it; yields the nodes."""
        nodes, asked = (self.nodes if phase == "rollout" else ["t0"]), self.at
        self.at = yield nodes
        self.at += 0.003
        self.token = self.cluster.grant(self, phase, nodes, step, asked)
        self.trainer(step, "lease_wait", self.at - asked, phase=phase, nodes=nodes, token=self.token)
        self.waited, self.lease_began = self.waited + self.at - asked, self.at

    def give_back(self, step: int, phase: str) -> None:
        left = [engine.node for engine in self.engines if engine.awake]
        nodes = [node for node in self.nodes if node in left] if phase == "rollout" else ["t0"]
        self.trainer(step, "phase", self.at - self.lease_began, phase=phase, nodes=nodes, token=self.token)
        self.cluster.release(self, phase, nodes, step, self.lease_began)

    def generate(self, step: int, validate: bool = False):
        """A rollout under its lease: weights, generation, sleep."""
        yield from self.lease(step, "rollout")
        self.until(lambda: False, self.at)  # tools that were still at work when their request was cut off
        for engine in self.engines:
            engine.wake(self.at, step, self.run.fault, 1.0 if step > 1 else self.rng.uniform(1.0, 1.4))
        self._move(step, "wake", self.engines)
        self.part(step, "sync", self.run.sync_s, version=step - 1, bytes=16e9, ranks=len(self.engines))
        began = self.at
        if validate:
            groups = [self.new_group(step, validate=True) for _ in range(2 * self.batch)]
            for group in groups:
                self.start(group.requests[0], step, self.at)
            self.until(lambda: all(group.ended for group in groups))
        else:
            for engine in self.engines:
                engine.maybe_stand_still(began, self.run.fault, self.name)
            self.rollout(step, self.batch)
        self.trainer(step, "generate", self.at - began)
        self._move(step, "sleep", [engine for engine in self.engines if engine.awake])
        self.give_back(step, "rollout")

    def steps(self):
        """Our trainer's."""
        self.trainer(0, "job_keys", keys=self._keys())
        for step in range(1, self.run.steps + 1):
            began, self.waited, self.tokens_of_step = self.at, 0.0, 0
            yield from self.generate(step)
            self.trainer(step, "sample_ready", 0.03)
            yield from self.lease(step, "train")
            for tag in ("params", "optimizer"):
                self.part(step, "wake", 0.4, tag=tag, bytes=30_000_000_000, mapped=30_000_000_000, node="t0", side="train")
            self._train(step)
            for tag in ("params", "optimizer"):
                self.part(step, "sleep", 0.4, tag=tag, bytes=30_000_000_000, mapped=0, node="t0", side="train")
            self.give_back(step, "train")
            if self.run.test_every and step % self.run.test_every == 0:
                validating = self.at
                yield from self.generate(step, validate=True)
                self.trainer(step, "validate", self.at - validating)
            self.at += 0.1
            self._step_over(step, began)

    def _train(self, step: int) -> None:
        seconds = self.run.train_s * self.tokens_of_step / 1000 / len(self.engines)
        self.part(step, "old_log_prob", 0.25 * seconds)
        self.part(step, "update_actor", 0.75 * seconds)
        if self.run.save_every and step % self.run.save_every == 0:
            self.part(step, "save_checkpoint", 12.0 * self.rng.lognormvariate(0, 0.3))

    def _step_over(self, step: int, began: float) -> None:
        figures = {"reward": 0.3 + 0.02 * step, "response_length": self.run.mean_tokens, "tokens": self.tokens_of_step}
        self.trainer(step, "step", self.at - began, **figures, loss=0.01, grad_norm=0.3, seconds={})
        self.cluster.step_report(self, step, figures)
        self.lines.own[self.name][step] = self.at - began - self.waited

    def _keys(self) -> list[str]:
        mode = ("separate_async" if self.run.overlap else "colocate_async") if not self.mux else "mux_separate"
        keys = {
            "trainer.v1.trainer_mode": mode, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
            "data.train_batch_size": self.batch, "data.max_prompt_length": 1024, "data.max_response_length": self.run.longest,
            "actor_rollout_ref.rollout.n": self.run.samples, "actor_rollout_ref.rollout.nnodes": len(self.nodes),
            "actor_rollout_ref.rollout.n_gpus_per_node": self.run.on_node,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1, "actor_rollout_ref.rollout.max_num_seqs": self.run.slots,
            "mux.rollout.oversample.rate": self.run.rate if self.run.mode == "oversampled" else 0.0,
            "mux.rollout.dispatch.order": "fifo", "mux.rollout.tail": "none",
            "mux.rollout.migration": self.run.mode == "migrated",
        }  # fmt: skip
        if self.run.mode == "segmented":
            keys["mux.rollout.segments.segment_length"] = max(32, int(self.run.mean_tokens * 1.2))
        return [f"{key}={value}" for key, value in keys.items()]

    # ------------------------------------------------------------ steps of verl's streaming trainers

    def streamed(self):
        """One batch is under way beyond the one that is waited for; engines pause while the trainer trains, or do not."""
        self.trainer(0, "job_keys", keys=self._keys())
        yield []
        for step in range(1, self.run.steps + 1):
            began = self.at
            for engine in self.engines:
                engine.wake(self.at, step, self.run.fault, 1.0)
            fresh = [self.new_group(step) for _ in range(self.batch * (2 if step == 1 else 1))]
            self.groups += fresh
            for it in [it for group in fresh for it in group.requests]:
                self.start(it, step, self.at)
            self.until(lambda: sum(group.ended for group in self.groups) >= self.batch)
            self.trainer(step, "sample_wait", self.at - began)
            done = [group for group in self.groups if group.ended][: self.batch]
            self.groups = [group for group in self.groups if not any(group is one for one in done)]
            self.tokens_of_step = sum(it.prompt + it.tokens for group in done for it in group.requests)
            sampled = self.at
            self.part(step, "sleep", 0.5)
            self._train(step)
            self.trainer(step, "step", self.at - began)
            self.part(step, "sync", self.run.sync_s)
            trained, self.at = self.at, sampled
            if not self.run.overlap:
                for engine in self.engines:
                    engine.close(sampled, trained)
            self.until(lambda: False, trained)
            self.lines.own[self.name][step] = self.at - began
            yield []
