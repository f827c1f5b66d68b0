import pytest

from tests.coordinator.core.placement.placed_jobs import placing_config
from tests.coordinator.driver import Driver
from verl_mux.coordinator.core.state import Machine


@pytest.fixture
def driver():
    return Driver(Machine(placing_config()))
