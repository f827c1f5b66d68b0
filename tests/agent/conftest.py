"""A coordinator in this process, its event log, and a wait for what it comes to."""

import pytest

from tests.coordinator.conftest import Lines, eventually, join, serve  # noqa: F401


@pytest.fixture
def event_log():
    return Lines()
