"""What a virtual engine costs: seconds a decoding step, a token read again, a trained token; and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bed:
    """batch: prompt groups a step. slots: requests that one replica runs at once; more wait. replicas: of the rollout pool.

    A decoding step gives one token to each running request and takes `step_s` + `request_s` for each of them. Tokens whose KV
    cache is gone take `prefill_s` each before the request goes on. Training takes `train_token_s` a token of the batch.
    switch_s: until a replica that changes hands generates: sleep, lease, weights, wake-up.
    """

    batch: int
    slots: int
    step_s: float
    request_s: float
    prefill_s: float
    train_token_s: float
    switch_s: float
    replicas: int = 1

    def told(self) -> str:
        """One line."""
        return (
            f"bed: {self.batch} prompt groups a step, {self.replicas} replicas of {self.slots} slots; a decoding step takes "
            f"{self.step_s * 1e3:g} ms + {self.request_s * 1e3:g} ms a request; {self.prefill_s * 1e6:g} us a token read again, "
            f"{self.train_token_s * 1e6:g} us a trained token, {self.switch_s:g} s when a replica changes hands"
        )
