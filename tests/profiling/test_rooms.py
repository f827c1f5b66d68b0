"""What each room of the log brings into the process that uses it."""

import pkgutil
import subprocess
import sys

import pytest

import verl_mux.profiling.eventlog
import verl_mux.profiling.plain

READERS_LIBRARIES = ("polars", "numpy", "matplotlib", "pandas", "pyarrow")


@pytest.mark.parametrize(
    ("room", "others"),
    [
        (verl_mux.profiling.eventlog, ("verl_mux.profiling.plain", "verl_mux.profiling.report")),
        (verl_mux.profiling.plain, ("verl_mux.profiling.report",)),
    ],
)
def test_who_writes_or_reads_plainly_needs_no_library_for_readers(room, others):
    modules = [f"{room.__name__}.{module.name}" for module in pkgutil.iter_modules(room.__path__)]
    script = f"import sys\nfor name in {modules}: __import__(name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert set(modules) <= set(loaded)
    assert not [name for name in loaded if name.startswith(others) or name.partition(".")[0] in READERS_LIBRARIES]
