import sys

import pytest

from verl_mux.bench.chaos import driver


def test_nobody_is_impatient_in_a_line_that_does_not_wait():
    def wait():
        driver._be_impatient(14, sys._getframe())

    driver._be_impatient(14, sys._getframe())
    with pytest.raises(driver._Impatient):
        wait()
