"""What one rollout engine holds on its device, as a table: an engine that sleeps twice is not asked twice.

SGLang's own release and resume are not idempotent (a second resume ends its scheduler process), and verl's HTTP client repeats
a call that timed out. So every request goes through this table first. Weights come before the KV cache on the way up, because
the sync fills them and frees its staging before the largest tag is mapped; on the way down both go at once.

    ACTIVE --sleep kv_cache--> KV_RELEASED --sleep weights--> ASLEEP_1 or ASLEEP_2
    ASLEEP_1 or ASLEEP_2 --wake weights--> KV_RELEASED --wake kv_cache--> ACTIVE
    any --failed--> FAILED (only a restart leaves it)

Level 1 keeps the weights in host memory and brings them back; level 2 drops them, and a sync must fill them again.
"""

from __future__ import annotations

from enum import Enum


class SleepState(Enum):
    ACTIVE = "active"
    KV_RELEASED = "kv_released"
    ASLEEP_1 = "asleep_1"
    ASLEEP_2 = "asleep_2"
    FAILED = "failed"


WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE)
LEVELS = {1: SleepState.ASLEEP_1, 2: SleepState.ASLEEP_2}
_ASLEEP = tuple(LEVELS.values())

Step = tuple[str, SleepState]


class SleepStates:
    """State of one engine. `plan` says what to do and changes nothing; `done` and `failed` record what happened."""

    def __init__(self, state: SleepState = SleepState.ACTIVE) -> None:
        self.state = state

    @property
    def level(self) -> int | None:
        """Of a sleeping engine."""
        return next((level for level, state in LEVELS.items() if state is self.state), None)

    def plan(self, verb: str, tags: list[str], level: int = 2) -> list[Step]:
        """Tags to release ("sleep") or resume ("wake"), each with the state after it. An engine that sleeps stays at its level.

        Raises:
            ValueError: the step is illegal, e.g. the KV cache before the weights, or a failed engine.
        """
        steps = _sleep(self.state, set(tags), LEVELS[level]) if verb == "sleep" else _wake(self.state, set(tags))
        if steps is None or not set(tags) <= set(TAGS) or not tags:
            raise ValueError(
                f"cannot {verb} {sorted(tags)} while the engine is {self.state.value}; tags are {list(TAGS)}, "
                "weights wake before the KV cache and sleep with or after it"
            )
        return steps

    def done(self, state: SleepState) -> None:
        self.state = state

    def failed(self) -> None:
        self.state = SleepState.FAILED


def _sleep(state: SleepState, tags: set[str], asleep: SleepState) -> list[Step] | None:
    """None: illegal."""
    if state in _ASLEEP:
        return []
    if state is SleepState.KV_RELEASED:
        return [(WEIGHTS, asleep)] if WEIGHTS in tags else []
    if state is SleepState.ACTIVE and KV_CACHE in tags:
        return [(KV_CACHE, SleepState.KV_RELEASED), *([(WEIGHTS, asleep)] if WEIGHTS in tags else [])]
    return None


def _wake(state: SleepState, tags: set[str]) -> list[Step] | None:
    if state is SleepState.ACTIVE:
        return []
    cache = [(KV_CACHE, SleepState.ACTIVE)] if KV_CACHE in tags else []
    if state is SleepState.KV_RELEASED:
        return cache
    return [(WEIGHTS, SleepState.KV_RELEASED), *cache] if state in _ASLEEP and WEIGHTS in tags else None
