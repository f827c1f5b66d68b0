"""How many examples the tests that use hypothesis try, and which. `python -m tests.exploring SECONDS` looks for new ones.

Profile `repeatable`, the default: the same examples in every run, so that a change is judged by itself. Profile `explore`
(--hypothesis-profile=explore): other examples for every --hypothesis-seed, and FACTOR times as many.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

FACTOR = 3  # a round is to reach every test; more rounds bring more examples
UNTIL = "EXPLORE_UNTIL"  # seconds since the epoch: no test starts later


def register_profiles() -> None:
    # No test fails because the machine is busy.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("repeatable", derandomize=True, max_examples=100, **patient)
    settings.register_profile("explore", max_examples=100 * FACTOR, print_blob=True, **patient)
    settings.load_profile("repeatable")
    # hypothesis also draws numbers and texts that it finds in the modules loaded so far: which examples a test gets would
    # depend on the tests before it.
    providers._get_local_constants = lambda: providers._local_constants


def examples(count: int) -> int:
    """For `settings(max_examples=...)`: `count` in the default profile, and in others as many times more as elsewhere."""
    return count * settings.default.max_examples // 100


def explore(seconds: float) -> int:
    """Rounds of all tests that use hypothesis, each with another seed, for so long or until one fails. Returns the exit code."""
    until = time.time() + seconds
    while time.time() < until:
        seed = secrets.randbelow(2**32)
        print(f"seed {seed}, {until - time.time():.0f} s to go", flush=True)
        chosen = ["-m", "hypothesis and not gpu and not e2e", "--hypothesis-profile=explore", f"--hypothesis-seed={seed}"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *chosen]
        if code := subprocess.call(command, env={**os.environ, UNTIL: str(until)}):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(explore(float(sys.argv[1])))
