"""Which tags of one rollout engine are awake, as a table: an engine that sleeps twice is not asked twice.

SGLang's own release and resume are not idempotent (a second resume ends its scheduler process), and verl's HTTP client repeats
a call that timed out. So every request goes through this table first. Weights come before the KV cache on the way up, because
the sync fills them and frees its staging before the largest tag is mapped; on the way down both go at once.

    AWAKE --sleep--> ASLEEP --wake weights--> WEIGHTS_AWAKE --wake kv_cache--> AWAKE
    any --failed--> FAILED (only a restart leaves it)
"""

from __future__ import annotations

from enum import Enum


class SleepState(Enum):
    AWAKE = "awake"
    WEIGHTS_AWAKE = "weights_awake"
    ASLEEP = "asleep"
    FAILED = "failed"


WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)

# (state, verb, tags asked for) -> (tags to really move, next state); what is absent is illegal.
_TABLE: dict[tuple[SleepState, str, frozenset[str]], tuple[tuple[str, ...], SleepState]] = {
    (SleepState.AWAKE, "sleep", frozenset(TAGS)): ((KV_CACHE, WEIGHTS), SleepState.ASLEEP),
    (SleepState.AWAKE, "sleep", frozenset({KV_CACHE})): ((KV_CACHE,), SleepState.WEIGHTS_AWAKE),
    (SleepState.AWAKE, "wake", frozenset(TAGS)): ((), SleepState.AWAKE),
    (SleepState.AWAKE, "wake", frozenset({WEIGHTS})): ((), SleepState.AWAKE),
    (SleepState.AWAKE, "wake", frozenset({KV_CACHE})): ((), SleepState.AWAKE),
    (SleepState.WEIGHTS_AWAKE, "sleep", frozenset(TAGS)): ((WEIGHTS,), SleepState.ASLEEP),
    (SleepState.WEIGHTS_AWAKE, "sleep", frozenset({WEIGHTS})): ((WEIGHTS,), SleepState.ASLEEP),
    (SleepState.WEIGHTS_AWAKE, "sleep", frozenset({KV_CACHE})): ((), SleepState.WEIGHTS_AWAKE),
    (SleepState.WEIGHTS_AWAKE, "wake", frozenset(TAGS)): ((KV_CACHE,), SleepState.AWAKE),
    (SleepState.WEIGHTS_AWAKE, "wake", frozenset({KV_CACHE})): ((KV_CACHE,), SleepState.AWAKE),
    (SleepState.WEIGHTS_AWAKE, "wake", frozenset({WEIGHTS})): ((), SleepState.WEIGHTS_AWAKE),
    (SleepState.ASLEEP, "sleep", frozenset(TAGS)): ((), SleepState.ASLEEP),
    (SleepState.ASLEEP, "sleep", frozenset({KV_CACHE})): ((), SleepState.ASLEEP),
    (SleepState.ASLEEP, "sleep", frozenset({WEIGHTS})): ((), SleepState.ASLEEP),
    (SleepState.ASLEEP, "wake", frozenset(TAGS)): ((WEIGHTS, KV_CACHE), SleepState.AWAKE),
    (SleepState.ASLEEP, "wake", frozenset({WEIGHTS})): ((WEIGHTS,), SleepState.WEIGHTS_AWAKE),
}


class SleepStates:
    """State of one engine. `plan` says what to do and changes nothing; `done` and `failed` record what happened."""

    def __init__(self, state: SleepState = SleepState.AWAKE) -> None:
        self.state = state

    def plan(self, verb: str, tags: list[str]) -> tuple[tuple[str, ...], SleepState]:
        """Tags to release ("sleep") or resume ("wake") in this order, and the state afterwards.

        Raises:
            ValueError: the step is illegal, e.g. the KV cache before the weights, or a failed engine.
        """
        try:
            return _TABLE[(self.state, verb, frozenset(tags))]
        except KeyError:
            raise ValueError(
                f"cannot {verb} {sorted(tags)} while the engine is {self.state.value}; tags are {list(TAGS)}, "
                "weights wake before the KV cache and sleep with or after it"
            ) from None

    def done(self, state: SleepState) -> None:
        self.state = state

    def failed(self) -> None:
        self.state = SleepState.FAILED
