"""What a prompt's text says about the length of its response: hashed words and word pairs, and a few numbers.

Cost is bounded: of a long prompt only the two ends are read, where instructions stand.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass

import numpy as np

BUCKETS = 1 << 18
_MAX_CHARS = 4096
_MAX_WORDS = 400
# Chinese, Japanese and Korean have no spaces between words: each sign counts as a word of its own.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|\d+(?:[.,]\d+)*|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """words: sorted distinct buckets below BUCKETS, (W,) int32. numbers: (10,) float32: logs of the
    counts of characters, words, lines, sentences, numbers, of the largest number and of the digits; the mean word's length, the
    share of capitals, of symbols."""

    words: np.ndarray
    numbers: np.ndarray


def describe(text: str) -> PromptFeatures:
    """Features of one prompt; at most a few hundred microseconds whatever its length."""
    shown = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS // 2]} {text[-_MAX_CHARS // 2 :]}"
    words = _WORD.findall(shown.lower())
    if len(words) > _MAX_WORDS:
        words = words[: _MAX_WORDS // 2] + words[-_MAX_WORDS // 2 :]
    return PromptFeatures(_buckets(words), _numbers(text, shown, words))


def _buckets(words: list[str]) -> np.ndarray:
    # crc32 and not hash(): the same in every process.
    one = [zlib.crc32(word.encode("utf-8", "replace")) for word in words]
    two = [(a * 0x9E3779B1 ^ b) for a, b in zip(one, one[1:], strict=False)]
    return np.unique(np.array(one + two, dtype=np.uint64) % BUCKETS).astype(np.int32)


def _numbers(text: str, shown: str, words: list[str]) -> np.ndarray:
    numbers = _NUMBER.findall(shown)
    largest = max((_magnitude(number) for number in numbers), default=0.0)
    letters = [len(word) for word in words if word[0].isalpha()]
    length = max(1, len(shown))
    return np.array(
        [
            math.log1p(len(text)),
            math.log1p(len(words)),
            math.log1p(shown.count("\n")),
            math.log1p(sum(shown.count(mark) for mark in ".?!\u3002\uff1f")),
            math.log1p(len(numbers)),
            largest,
            math.log1p(sum(map(len, numbers))),
            sum(letters) / max(1, len(letters)),
            sum(map(str.isupper, shown)) / length,
            (len(words) - len(letters) - len(numbers)) / max(1, len(words)),
        ],
        dtype=np.float32,
    )


def _magnitude(number: str) -> float:
    digits = number.replace(",", "").split(".")[0][:15]
    return math.log1p(int(digits)) if digits else 0.0
