"""When the CPU platform is taken, and when it leaves verl and SGLang alone."""

import importlib
import os
import sys

import pytest

from verl_mux.platform import choose
from verl_mux_cpu import kernel_placeholders, plugin


@pytest.mark.parametrize("wanted", [True, False])
def test_the_kernel_placeholders_come_with_the_cpu_platform_alone(monkeypatch, wanted):
    calls = []
    monkeypatch.setattr(kernel_placeholders, "install", lambda: calls.append(1))
    monkeypatch.setattr(choose, "_DEVICE_FILES", ("/no/such/device",))
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if wanted:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    plugin.activate()
    assert calls == [1] * wanted


def test_where_it_is_not_wanted_nothing_is_set_or_registered(monkeypatch):
    monkeypatch.setattr(choose, "_DEVICE_FILES", ("/no/such/device",))
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    meta_path = list(sys.meta_path)
    importlib.reload(plugin)
    assert "VERL_PLATFORM" not in os.environ and sys.meta_path == meta_path


def test_without_the_package_a_part_is_refused_with_the_way_to_it(monkeypatch):
    monkeypatch.setattr(choose, "_cpu_parts", dict)
    assert choose.cpu_package_missing()
    with pytest.raises(choose.UserError, match="verl-mux-cpu is not installed: `pip install ./verl_mux_cpu`"):
        choose.cpu_part("saver")
