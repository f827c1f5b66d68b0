"""The rule reward of the arithmetic example, in the form verl's reward loop calls it."""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"#(\d)\s*\Z")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any) -> float:
    """1.0 when the solution ends with `#` and the right digit, otherwise 0.0.

    `solution_str` is the response without special tokens, so one cut off at the length limit has no last line and
    scores 0.
    """
    found = ANSWER.search(solution_str)
    return float(found is not None and found.group(1) == ground_truth)
