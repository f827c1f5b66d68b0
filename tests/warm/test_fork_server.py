"""A real fork server and real clients. Most import nothing in advance, which takes ten seconds; one imports all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_mux.warm import fork_client

ROOT = Path(__file__).parents[2]
# A fork server that imports next to nothing, whose driver prints what its clients need, and ends when its standard input ends.
SERVER = """
import sys
from verl_mux.warm import fork_server
fork_server.PRELOADED = ("numpy",)
fork_server.plugin.ENGINES = {}
fork_server.main()
"""
DRIVER = """
import os, sys
print(os.environ["VERL_MUX_FORK_SERVER"], os.getpid(), flush=True)
sys.exit(int(sys.stdin.read() or 0))
"""


class Server:
    """A fork server, its driver, and the name of its socket."""

    def __init__(self, folder: Path) -> None:
        (folder / "driver_program.py").write_text(DRIVER)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "driver_program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=folder, start_new_session=True,
        )  # fmt: skip
        self.name, pid = self.process.stdout.readline().split()
        self.driver = psutil.Process(int(pid))

    def client(self, program: str, *words: str, folder: Path, **environment: str) -> subprocess.Popen:
        (folder / "worker.py").write_text(textwrap.dedent(program))
        command = [sys.executable, "-I", "-S", fork_client.__file__, self.name, "-u", str(folder / "worker.py"), *words]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env={**os.environ, **environment}
        )


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    made = Server(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """For tests that leave it as it is."""
    with running(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """For tests that end it."""
    with running(tmp_path) as made:
        yield made


@pytest.mark.parametrize("code", [0, 3])
def test_it_ends_with_its_drivers_exit_code(mortal, code):
    mortal.process.communicate(str(code), timeout=30)
    assert mortal.process.returncode == code


def test_it_ends_by_the_signal_that_ended_its_driver(mortal):
    mortal.driver.kill()
    assert mortal.process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_it_reaches_its_driver(mortal, number):
    mortal.process.send_signal(number)
    mortal.process.wait(30)
    assert not mortal.driver.is_running()


def test_a_worker_has_its_clients_arguments_environment_folder_output_cores_and_niceness(server, tmp_path):
    folder = tmp_path / "worker"
    folder.mkdir()
    program = """
        import json, os, sys
        print(json.dumps([sys.argv[1:], os.environ["GIVEN"], os.getcwd(), __name__, __file__, sys.path[0], os.nice(0),
                          sorted(os.sched_getaffinity(0)), "numpy" in sys.modules]))
        print("to stderr", file=sys.stderr)
        sys.exit(7)
    """
    worker = server.client(program, "--one", "two", folder=folder, GIVEN="ä b")
    os.setpriority(os.PRIO_PROCESS, worker.pid, 0)
    out, err = worker.communicate(timeout=30)
    cores = sorted(os.sched_getaffinity(0))
    expected = [["--one", "two"], "ä b", str(folder), "__main__", str(folder / "worker.py"), str(folder), os.nice(0), cores, True]
    assert (json.loads(out), err, worker.returncode) == (expected, "to stderr\n", 7)


def test_a_client_ends_by_the_signal_that_ended_its_worker(server, tmp_path):
    worker = server.client("import os; os.kill(os.getpid(), 9)", folder=tmp_path)
    worker.communicate(timeout=30)
    assert worker.returncode == -signal.SIGKILL


def test_a_signal_to_a_client_reaches_its_worker(server, tmp_path):
    worker = server.client("import os, time; print(os.getpid(), flush=True); time.sleep(60)", folder=tmp_path)
    pid = int(worker.stdout.readline())
    worker.terminate()
    worker.communicate(timeout=30)
    assert not psutil.pid_exists(pid)
    assert worker.returncode == -signal.SIGTERM


def test_a_worker_is_no_descendant_of_another_and_draws_its_own_random_numbers(server, tmp_path):
    program = "import numpy, os, random; print(random.random(), numpy.random.rand(), os.getppid())"
    workers = [server.client(program, folder=tmp_path) for _ in range(2)]
    first, second = (worker.communicate(timeout=30)[0].split() for worker in workers)
    assert first[0] != second[0] and first[1] != second[1]
    assert int(first[2]) == int(second[2]) == server.process.pid


def test_what_ends_all_of_a_workers_group_leaves_its_server_and_the_others(server, tmp_path):
    """A raylet does that when a worker has ended."""
    client = server.client("import os, signal; os.killpg(0, signal.SIGKILL)", folder=tmp_path)
    assert client.wait(30) == -signal.SIGKILL
    assert server.client("print('served')", folder=tmp_path).communicate(timeout=30)[0] == "served\n"


def test_a_killed_server_takes_its_driver_and_its_clients_along(mortal, tmp_path):
    worker = mortal.client("import time; print('runs', flush=True); time.sleep(60)", folder=tmp_path)
    worker.stdout.readline()
    mortal.process.kill()
    psutil.wait_procs([mortal.driver], timeout=30)
    assert not mortal.driver.is_running() or mortal.driver.status() == psutil.STATUS_ZOMBIE
    assert worker.wait(30) == 1


def test_without_a_server_a_client_becomes_the_interpreter_and_says_so(tmp_path):
    (tmp_path / "worker.py").write_text("import sys; print('ran', sys.argv[1:]); sys.exit(4)")
    command = [sys.executable, "-I", "-S", fork_client.__file__, "nowhere", str(tmp_path / "worker.py"), "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("ran ['x']\n", 4)
    assert done.stderr.count("\n") == 1 and "no fork server" in done.stderr


def test_a_client_in_another_container_becomes_the_interpreter(server, tmp_path):
    server.name, name = server.name.replace(str(fork_client.space()), "1"), server.name
    client = server.client("import os; print(os.getpid())", folder=tmp_path)
    server.name = name
    said, why = client.communicate(timeout=30)
    assert int(said) == client.pid and "it is in another container" in why


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_client_is_refused(server):
    attack = f"""
import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect("\\0{server.name}")
s.settimeout(20)
try:
    socket.send_fds(s, [b"\\0\\0\\0\\2{{}}"], [0, 1, 2])
    print(s.recv(4) or "refused")
except OSError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", attack], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n"
    assert server.process.poll() is None


ATTACK = """
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1].replace("@", chr(0)))
s.settimeout(20)
ours, theirs = os.pipe(), os.pipe()
try:
    socket.send_fds(s, [b"\\4"], [ours[0], theirs[1], ours[1], theirs[0]])
    os.close(theirs[1])
    print("forked" if os.read(theirs[0], 8) else "refused")
except OSError:
    print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_fork_of_an_engines_server_and_its_own_user_still_does(server, tmp_path):
    """It could hand over a program to run as the job's user."""
    program = f"""
        import os, sys, json, socket, subprocess
        sys.path.insert(0, {str(ROOT)!r})
        from multiprocessing import forkserver
        from tests.warm.engine import launch
        if __name__ == "__main__":
            address = forkserver._forkserver._forkserver_address.replace(chr(0), "@")
            done = subprocess.run([sys.executable, "-c", {ATTACK!r}, address], capture_output=True, text=True, timeout=60)
            print(json.dumps([done.stdout.strip() or done.stderr, launch()[2]]))
    """
    worker = server.client(program, folder=tmp_path)
    out, err = worker.communicate(timeout=60)
    assert json.loads(out) == ["refused", True], err


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\2[]", b"\x7f\xff\xff\xff{", b'\0\0\0\2{"', b'\0\0\0\x0d{"words": [1]}'])
def test_a_client_that_asks_for_nonsense_is_refused_and_the_next_is_served(server, tmp_path, sent):
    attack = f"""
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("\\0{server.name}")
s.sendall({sent!r})
s.shutdown(socket.SHUT_WR)
s.settimeout(20)
assert s.recv(4) == b""
"""
    subprocess.run([sys.executable, "-c", attack], check=True)
    worker = server.client("print('served')", folder=tmp_path)
    assert worker.communicate(timeout=30)[0] == "served\n"


@pytest.mark.e2e
def test_all_that_is_imported_in_advance_starts_no_thread_opens_no_device_and_leaves_ray_out(forked, tmp_path):
    """It forks at all, so `why_not_fork` found nothing."""
    (tmp_path / "missing.py").write_text(
        "import sys; from verl_mux.rollout.engine.record import installed; from verl_mux.warm.fork_server import PRELOADED;"
        " asked = {it for one in installed() for it in one.preload}; print(sorted({*PRELOADED, *asked} - sys.modules.keys()))"
    )
    done = forked(str(tmp_path / "missing.py"), cwd=ROOT, VERL_PLATFORM="cpu", PYTHONPATH=str(ROOT))
    assert (done.stdout.splitlines()[-1], done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "1 threads"),
        ("import ray", "ray"),
    ],
)
def test_what_a_fork_would_not_carry_over_makes_the_driver_start_without_forks(tmp_path, statement, reason):
    (tmp_path / "obstacle.py").write_text(statement)
    (tmp_path / "driver_program.py").write_text("import os, sys; print(bool(os.environ['VERL_MUX_FORK_SERVER']), sys.argv[1:])")
    server = SERVER.replace('("numpy",)', "('obstacle',)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", server, "driver_program", "x"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "False ['x']\n"
    assert done.stderr.count("\n") == 1 and reason in done.stderr


def test_an_engines_processes_are_forks_with_the_environment_and_cores_of_its_server_and_end_with_it(server, tmp_path):
    program = f"""
        import os, sys, json, multiprocessing
        sys.path.insert(0, {str(ROOT)!r})
        from verl_mux.warm import engine_processes
        from tests.warm.engine import launch
        if __name__ == "__main__":
            os.environ["LATER"] = "set"
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
            print(json.dumps([engine_processes.is_ready(), launch(), multiprocessing.get_start_method()]))
    """
    worker = server.client(program, folder=tmp_path)
    out, err = worker.communicate(timeout=60)
    ready, (later, cores, imported, descends), method = json.loads(out)
    assert (ready, later, len(cores), imported, descends, method) == (True, "set", 1, True, True, "spawn"), err


def test_processes_of_a_context_of_ours_are_forks_and_so_are_theirs(server, tmp_path):
    program = f"""
        import os, sys, json
        sys.path.insert(0, {str(ROOT)!r})
        from tests.warm.engine import launch_core
        if __name__ == "__main__":
            os.environ["LATER"] = "set"
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
            print(json.dumps(launch_core()))
    """
    worker = server.client(program, folder=tmp_path)
    out, err = worker.communicate(timeout=60)
    assert json.loads(out) == ["set", [min(os.sched_getaffinity(0))], True, True, "core", True, 0], err


def test_processes_of_a_context_of_ours_end_when_their_server_is_killed(server, tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.warm.engine import launch_and_stay
        if __name__ == "__main__":
            launch_and_stay()
    """
    with server.client(program, folder=tmp_path) as client:
        engine, *processes = [psutil.Process(int(pid)) for pid in client.stdout.readline().split()]
        engine.kill()
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            process.kill()
        assert not alive
