"""Several virtual jobs on one rollout pool, with a training node each.

turns: a rollout has all replicas from its first request to its last response; the others train beside it.
shared: a rollout starts on whatever is free and grows onto replicas that nobody wants. What it has beyond its share of the pool
is lent: it goes back as soon as another job waits, and its requests go on elsewhere with their tokens. In its share it gathers
its tail on fewer replicas for a job that waits. What moves, and whether, the product's `migration_plan.py` and
`growth_plan.py` say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from research.rollouts.bed import Bed
from research.rollouts.engine import NEVER, Key, Replica, Request
from research.rollouts.job import VirtualJob
from verl_mux.rollout.control import growth_plan, migration_plan
from verl_mux.rollout.control.migration_plan import EngineSpeed, Migration, MigrationPolicy

# On a bed of small steps a node-second is much; what a move must win is nothing but more than it costs.
_SHRINK = MigrationPolicy(enable=True, min_gain_s=0.0)


@dataclass(slots=True, eq=False)
class _Place:
    """A replica and who has it. lent: until another job waits."""

    name: str
    replica: Replica
    job: VirtualJob | None = None
    lent: bool = False


class Pool:
    """run() -> seconds until the last job is over."""

    def __init__(self, jobs: Sequence[VirtualJob], bed: Bed, longest: int, *, shared: bool) -> None:
        self._bed, self._longest, self._shared = bed, longest, shared
        self._share = max(1, bed.replicas // len(jobs)) if shared else bed.replicas
        self._places = [_Place(f"r{number}", Replica(bed)) for number in range(bed.replicas)]
        self._waiting = list(jobs)  # for the rollout pool, the longest first
        self._training: list[tuple[float, VirtualJob]] = []  # until when
        self._live: dict[Key, Request] = {}
        self._now = 0.0
        self._speed = EngineSpeed(1 / bed.prefill_s if bed.prefill_s else NEVER, bed.step_s, bed.request_s)
        for job in jobs:
            job.submit, job.abort = self._submit, self._abort

    def run(self) -> float:
        """Carry all jobs through."""
        self._hand_out()
        while (now := self._next()) < NEVER:
            self._now = now
            for place in self._places:
                for request in place.replica.advance(now):
                    self._live.pop(request.key)
                    assert place.job is not None
                    place.job.ended(request)
            self._hand_out()
        return self._now

    # ----------------------------------------------------------------

    def _next(self) -> float:
        ends = [place.replica.next_end() for place in self._places]
        return min([*ends, *(until for until, _ in self._training), NEVER])

    def _hand_out(self) -> None:
        for job in {place.job for place in self._places if place.job is not None and place.job.finished}:
            self._give_back([place for place in self._places if place.job is job])
            self._training.append((self._now + job.batch_tokens * self._bed.train_token_s, job))
        for until, job in [training for training in self._training if training[0] <= self._now]:
            self._training.remove((until, job))
            self._waiting += [] if job.over else [job]
        self._start()
        if self._shared and self._waiting:
            self._shrink()
            self._start()
        if self._shared and not self._waiting:
            self._grow()

    def _start(self) -> None:
        free = [place for place in self._places if place.job is None]
        if not self._waiting or not free or not (self._shared or len(free) == len(self._places)):
            return
        job = self._waiting.pop(0)
        for place in free[: self._share]:
            self._take(place, job)
        for place in free[self._share :]:
            self._take(place, job, lent=True)
        job.begin()

    def _take(self, place: _Place, job: VirtualJob, lent: bool = False) -> None:
        place.job, place.lent = job, lent
        place.replica.ready = self._now + self._bed.switch_s
        place.replica.at = max(place.replica.at, self._now)

    def _give_back(self, places: Sequence[_Place]) -> None:
        for place in places:
            place.job, place.lent = None, False

    def _shrink(self) -> None:
        """Replicas that are lent go back at once; others where the planner finds that the tail fits on fewer."""
        for job in dict.fromkeys(place.job for place in self._places if place.job is not None):
            mine = [place for place in self._places if place.job is job]
            leaving = [place for place in mine if place.lent]
            if not leaving and len(mine) > 1:
                views = [self._view(place) for place in mine]
                found = migration_plan.plan(views, job.done, job.launched, [[place.name] for place in mine], self._speed, _SHRINK)
                leaving = [place for place in mine if place.name in found.freed] if isinstance(found, Migration) else []
            if leaving and len(leaving) < len(mine):
                self._evacuate(leaving, [place for place in mine if place not in leaving])
                return

    def _evacuate(self, leaving: Sequence[_Place], kept: Sequence[_Place]) -> None:
        for place in leaving:
            for key in place.replica.held():
                self._move(key, place, min(kept, key=lambda it: it.replica.requests))
        self._give_back(leaving)

    def _grow(self) -> None:
        for place in [place for place in self._places if place.job is None]:
            for job in dict.fromkeys(other.job for other in self._places if other.job is not None):
                mine = [other for other in self._places if other.job is job]
                waiting = [_name(key) for other in mine for key in other.replica.waiting()]
                moves = growth_plan.pull([self._view(other) for other in mine], self._view(place), waiting, self._speed)
                won = self._ends([self._view(other) for other in mine]) - self._bed.switch_s
                if moves and won > 0:
                    self._take(place, job, lent=True)
                    names = {move.request: move.source for move in moves}
                    for other in mine:
                        for key in [key for key in other.replica.held() if _name(key) in names]:
                            self._move(key, other, place)
                    break

    def _ends(self, views: Sequence[migration_plan.Replica]) -> float:
        return max(migration_plan.seconds_until_idle(view.requests, self._speed) for view in views)

    def _move(self, key: Key, source: _Place, target: _Place) -> None:
        total = source.replica.abort(key)
        assert total is not None
        request = self._live[key]
        # What waited for its turn has read nothing yet; what ran reads all of it again.
        read = request.read if total == request.kept else total
        moved = request._replace(kept=request.kept, more=request.more, read=read)
        target.replica.submit(moved, done=total - request.kept)

    def _submit(self, request: Request) -> None:
        self._live[request.key] = request
        mine = [place for place in self._places if place.job is not None and place.job.name == request.key[0]]
        min(mine, key=lambda place: place.replica.requests).replica.submit(request)

    def _abort(self, key: Key) -> int | None:
        self._live.pop(key, None)
        return next((total for place in self._places if (total := place.replica.abort(key)) is not None), None)

    def _view(self, place: _Place) -> migration_plan.Replica:
        """As the planners see it: a request's length is not known."""
        requests = tuple(
            migration_plan.Request(_name(key), tokens, migration_plan.expected_remaining(tokens, self._longest))
            for key, tokens in place.replica.tokens().items()
        )
        return migration_plan.Replica(place.name, (place.name,), requests, self._bed.slots, self._bed.slots * self._longest * 2)


def _name(key: Key) -> str:
    return "/".join(map(str, key))
