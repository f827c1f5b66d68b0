"""Folders in which nothing can be made, and folders full of files: one line, and nothing lost that was kept."""

import os

import pytest
import yaml

from tests.profiling.made_logs import read_run
from verl_mux.profiling.eventlog.log import EventLog

READ_ONLY = "/sys/verl_mux"  # for root too
NODES = {"rollout": ["r0"], "train": ["t0"]}
POOLS = {side: {"nodes": [{"name": name} for name in names]} for side, names in NODES.items()}
MANY = 100_000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("coordinator --config pools.yaml --log-dir {at}/log", "--log-dir {at}/log: cannot make this folder"),
        ("coordinator --config pools.yaml --journal {at}/journal", "journal {at}/journal cannot be used"),
        ("agent --log-dir {at}/log", "cannot make this folder"),
        ("keys {at}/keys", "cannot make keys in {at}/keys"),
        ("run run.yaml --dir {at}/run", "cannot make the folder {at}/run"),
        ("report log --html {at}.html", "cannot write"),
        ("report log --trace {at}.json", "cannot write"),
        ("report log --otlp {at}.jsonl", "cannot write"),
    ],
)
def test_a_folder_that_cannot_be_written_ends_a_command_in_one_line(run_main, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pools.yaml").write_text(yaml.dump({"pools": POOLS}))
    (tmp_path / "run.yaml").write_text(
        yaml.dump({"dir": "run", "coordinator": {"pools": POOLS}, "jobs": {"a": {"nodes": NODES}}})
    )
    log = EventLog(tmp_path / "log", role="trainer")
    log.log("step", 1.0, step=1)
    log.close()
    code, _, err = run_main(*line.format(at=READ_ONLY).split())
    assert code == (1 if line.startswith("report") else 2) and err.count("\n") == 1 and words.format(at=READ_ONLY) in err


def test_among_a_hundred_thousand_files_each_line_is_written_and_read(tmp_path):
    folder = tmp_path / "trainer" / "step_1"
    folder.mkdir(parents=True)
    for number in range(MANY):
        os.mknod(folder / f"worker_{number}.jsonl")
    log = EventLog(tmp_path, worker=7, role="trainer", max_bytes=1000)
    for _ in range(50):
        log.log("step", 1.0, step=1)
    log.close()
    run = read_run(tmp_path)
    assert run.tables.totals.filter(run.tables.totals["event"] == "step")["count"].sum() == 50
    assert not run.faults.skipped
