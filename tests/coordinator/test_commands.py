"""The two commands, as a user calls them."""

import json
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from verl_mux import cli
from verl_mux.coordinator import commands, status_view
from verl_mux.coordinator.bus.members import UID_VARIABLE


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["verl-mux", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_status_prints_plain_lines_where_there_is_no_terminal(monkeypatch, capsys, serve, join):
    coordinator = serve(expect_jobs=2)
    a = join(coordinator, "a", steps=9)
    a.memory("r0", {"weights": 3 * 2**20})
    a.acquire("init")  # once it is answered, what was sent before it has arrived
    assert call(monkeypatch, "status", "--address", coordinator.address) == 0
    printed = capsys.readouterr().out.splitlines()
    where = "interleaved (segment 1 of 1, waiting for the expected jobs)"
    assert printed[0] == f"coordinator {coordinator.address}: {where}"
    assert printed[1].startswith("node rollout/r0: a init 0 for ")
    assert printed[1].endswith("; no job waits; 3 MiB, peak 3 MiB")
    assert printed[4] == "job a: live; step 0 of 9; -"


def test_a_job_that_starts_up_says_at_what_it_is(serve, join):
    coordinator = serve()
    a = join(coordinator, "a")
    a.note("starting engines")
    a.release(a.acquire("init"))
    assert "job a: live (starting engines, 0 s); step 0; -" in status_view.plain(coordinator.snapshot()).splitlines()
    a.acquire("rollout", step=1)
    assert "job a: live; step 1; -" in status_view.plain(coordinator.snapshot()).splitlines()


def test_status_as_json_has_no_nan(monkeypatch, capsys, serve, join):
    coordinator = serve()
    a = join(coordinator, "a")
    a.report_step(1, {"reward": float("nan"), "grad_norm": float("inf"), "score": 0.5})
    a.acquire("rollout", step=1)  # once it is answered, what was sent before it has arrived
    assert call(monkeypatch, "status", "--address", coordinator.address, "--json") == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert told["jobs"]["a"]["metrics"] == {"reward": None, "grad_norm": None, "score": 0.5}


def test_status_on_a_terminal_is_a_table(serve, join):
    coordinator = serve()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    b.report_step(3, {"reward": 0.5})
    b.release(b.acquire("train", step=3))  # once it is answered, what was sent before it has arrived
    a.acquire("rollout", step=1)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_view.tables(coordinator.snapshot()))
    shown = console.export_text()
    assert "a rollout 1 for" in shown
    assert "idle" in shown


def test_status_without_a_coordinator_ends_with_code_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(commands, "ANSWER_S", 0.1)
    assert call(monkeypatch, "status", "--address", "tcp://127.0.0.1:9") == 2
    assert capsys.readouterr().err == "verl-mux: no coordinator answers at tcp://127.0.0.1:9 (waited 0.1 s)\n"


def test_a_coordinator_with_a_bad_file_or_address_ends_with_code_2(monkeypatch, capsys, tmp_path, serve):
    (tmp_path / "mux.yaml").write_text("pools: {rollout: {nodes: [{name: r0}]}}\n")
    file = str(tmp_path / "mux.yaml")
    assert call(monkeypatch, "coordinator", "--config", str(tmp_path / "none.yaml")) == 2
    assert "cannot read" in capsys.readouterr().err
    assert call(monkeypatch, "coordinator", "--config", file, "--journal", "j", "--no-journal") == 2
    assert capsys.readouterr().err == "verl-mux: --journal j and --no-journal were both given; choose one\n"
    assert call(monkeypatch, "coordinator", "--config", file, "--bind", serve().address) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "9" * 5000])
def test_a_port_that_there_is_none_of_is_refused_on_both_sides(monkeypatch, capsys, tmp_path, port):
    (tmp_path / "mux.yaml").write_text("pools: {rollout: {nodes: [{name: r0}]}}\n")
    address = f"tcp://127.0.0.1:{port}"
    assert call(monkeypatch, "coordinator", "--config", str(tmp_path / "mux.yaml"), "--bind", address, "--no-journal") == 2
    assert call(monkeypatch, "status", "--coordinator", address) == 2
    told = f"verl-mux: {address} names port {port}; a port is a number from 0 (any free one, to listen at) to 65535\n"
    assert capsys.readouterr().err == told * 2


@pytest.mark.parametrize("arguments", [("coordinator", "--config", "mux.yaml", "--no-journal"), ("agent", "--devices", "none")])
def test_a_log_that_could_not_be_written_is_refused(monkeypatch, capsys, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(UID_VARIABLE, "a:1")  # an agent that a job starts starts itself again, once all that was given is good
    (tmp_path / "mux.yaml").write_text("pools: {rollout: {nodes: [{name: r0}]}}\n")
    assert call(monkeypatch, *arguments, "--log-dir", "mux.yaml") == 2
    assert "verl-mux: --log-dir mux.yaml" in capsys.readouterr().err


def nodes_file(path, *nodes):
    path.write_text(json.dumps({"pools": {"rollout": {"nodes": list(nodes)}, "train": {"nodes": [{"name": "t0"}]}}}))


def test_sighup_drains_adds_and_removes_nodes_as_the_file_has_them(tmp_path, join, eventually):
    """In a process of its own: a node drains, leaves when it is no job's, and another comes; a bad file changes nothing."""
    file, r0, r1 = tmp_path / "mux.yaml", {"name": "r0"}, {"name": "r1"}
    nodes_file(file, r0, r1)
    options = ["--config", str(file), "--no-journal", "--bind", "tcp://127.0.0.1:0"]
    command = [sys.executable, "-m", "verl_mux", "coordinator", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stderr.readline().split()[3]
            answers = iter(process.stderr.readline, "")

            def reload(*nodes):
                nodes_file(file, *nodes)
                process.send_signal(signal.SIGHUP)
                return next(line for line in answers if "journal" not in line)

            def seen():
                return commands.fetch_status(address, 60)["pools"]["rollout"]["nodes"]

            eventually(lambda: process.poll() is None and seen())
            a = join(address, "a", nodes={"rollout": ["r0", "r1"], "train": ["t0"]})
            lease = a.acquire("rollout", step=1)
            assert "job 'a' holds it" in reload(r1)
            assert reload({**r0, "drain": True}, r1).startswith("read again; pools and their nodes: rollout (r0, r1)")
            assert seen()["r0"]["draining"] and [held["job"] for held in seen()["r0"]["holders"]] == ["a"]
            a.release(lease)
            a.close()
            b = join(address, "b", nodes={"rollout": ["r1"], "train": ["t0"]})
            assert reload(r1, {"name": "r2"}).startswith("read again; pools and their nodes: rollout (r1, r2)")
            assert list(seen()) == ["r1", "r2"]
            b.release(b.acquire("rollout", step=1, nodes=["r1"]))
            b.close()
        finally:
            process.kill()
            process.communicate()
