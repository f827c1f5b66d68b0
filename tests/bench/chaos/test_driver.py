import sys

import pytest

from bench.chaos import driver
from verl_mux.coordinator.bus.client import Mux


def test_a_job_is_impatient_in_the_clients_call_but_not_in_its_own_lines(monkeypatch):
    def look_at_the_clock():
        driver._be_impatient(14, sys._getframe())

    def acquire():
        look_at_the_clock()

    look_at_the_clock()
    monkeypatch.setattr(Mux, "acquire", acquire)
    with pytest.raises(driver._Impatient):
        Mux.acquire()
