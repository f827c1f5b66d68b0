"""verl and SGLang do what we rely on, and not only have the names for it."""

import pytest

from tests.upstream.protocols import PROTOCOLS


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol(probe, name):
    assert probe["protocols"][name] is None, probe["protocols"][name]
