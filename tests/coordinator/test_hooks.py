"""Whoever starts and ends nodes is told, by a command or a URL; what goes wrong is told back and stops nobody."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from tests.coordinator.core.placement.placed_jobs import AUTO, needs, placing_config
from verl_mux.coordinator.core.inputs_and_instructions import Call, HookFailed
from verl_mux.coordinator.hooks import Hooks
from verl_mux.coordinator.server import Coordinator

CALL = Call("on_nodes_wanted", "rollout", {"pool": "rollout", "more": 2}, {"pool": "rollout", "more": "2"})


def tell(hook, seconds=60.0, call=CALL):
    """What was told back."""

    async def run():
        failed = []
        hooks = Hooks(asyncio.get_running_loop(), failed.append, {"WHERE": "here"}, seconds)
        hooks.call(call, hook)
        ended = asyncio.Event()  # the thread takes one thing at a time
        asyncio.get_running_loop().run_in_executor(hooks._thread, lambda: None).add_done_callback(lambda _: ended.set())
        await ended.wait()
        await asyncio.sleep(0)
        hooks.close()
        return failed

    return asyncio.run(run())


@pytest.fixture
def site():
    """Keeps what is posted, and answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    posted = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    server.server_close()


def test_a_line_for_the_shell_has_what_is_brief_in_its_environment(tmp_path):
    line = f'echo "$WHERE $VERL_MUX_HOOK $VERL_MUX_POOL $VERL_MUX_MORE" > {tmp_path}/told; cat >> {tmp_path}/told'
    assert tell(line) == []
    brief, body = (tmp_path / "told").read_text().splitlines()
    assert brief == "here on_nodes_wanted rollout 2"
    assert json.loads(body) == {"hook": "on_nodes_wanted", "pool": "rollout", "more": 2}


def test_a_program_gets_its_arguments_as_they_are(tmp_path):
    assert tell(["cp", "/dev/stdin", f"{tmp_path}/$HOME; told"]) == []
    assert json.loads((tmp_path / "$HOME; told").read_text())["more"] == 2


def test_one_that_reads_nothing_is_no_failure():
    assert tell("true") == []


def test_a_url_is_posted_to(site):
    url, posted = site
    assert tell(f"{url}/scale") == [] and posted[0]["more"] == 2


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("echo no money; exit 3", "exit code 3: no money"),
        ("exit 3", "exit code 3: it said nothing"),
        (["/nowhere/start"], "/nowhere/start cannot be started: No such file or directory"),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/: <urlopen error"),
        ("http://[", "ValueError"),
    ],
)
def test_what_goes_wrong_is_told_back_in_a_line(hook, why):
    (told,) = tell(hook)
    assert isinstance(told, HookFailed) and (told.pool, told.more) == ("rollout", 2) and why in told.reason


def test_a_url_that_refuses_is_a_failure(site):
    (told,) = tell(f"{site[0]}/broken")
    assert "500" in told.reason


def test_one_that_does_not_end_is_ended_with_all_that_it_started(tmp_path, eventually):
    (told,) = tell(f"sleep 600 & echo $! > {tmp_path}/pid; wait", seconds=0.5)
    assert "did not end within 0.5 s" in told.reason
    pid = (tmp_path / "pid").read_text().strip()
    eventually(lambda: not _runs(pid))


def _runs(pid):
    try:
        return "\nState:\tZ" not in open(f"/proc/{pid}/status").read()
    except (FileNotFoundError, ProcessLookupError):  # the second one: it ended between the opening and the reading
        return False


def test_a_command_that_starts_while_all_is_closed_is_ended_too(monkeypatch):
    def popen(*args, **options):
        started.append(real(*args, **options))
        hooks.close()
        return started[0]

    async def run():
        nonlocal hooks
        hooks = Hooks(asyncio.get_running_loop(), lambda _: None, {})
        hooks.call(CALL, "sleep 600")
        await asyncio.get_running_loop().run_in_executor(None, hooks._thread.shutdown)

    started, hooks, real = [], None, subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert started[0].returncode == -signal.SIGKILL


def test_a_coordinator_tells_of_idle_nodes_and_grants_while_it_does(serve, join, event_log, eventually, tmp_path):
    coordinator = serve(on_nodes_idle=f"cat > {tmp_path}/told; sleep 5; exit 1", idle_after=0.1)
    job = join(coordinator, "a")
    eventually(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text())
    began = time.monotonic()
    job.acquire("rollout", step=1)
    assert time.monotonic() - began < 4 and not event_log.of("hook_failed"), "it still runs"
    assert [node["node"] for node in json.loads((tmp_path / "told").read_text())["nodes"]] == ["r1"]
    eventually(lambda: event_log.of("hook_failed"))


def test_who_waits_starts_on_the_node_that_the_hook_brings(join, event_log):
    add = f"{sys.executable} -m verl_mux node add r7 --pool $VERL_MUX_POOL --timeout 60"
    config = msgspec.structs.replace(placing_config(), on_nodes_wanted=add)
    now = {name: msgspec.structs.replace(pool, delay=0.0) for name, pool in config.pools.items()}
    with Coordinator(msgspec.structs.replace(config, pools=now), event_log=event_log) as coordinator:
        join(coordinator, "a", AUTO, needs=needs(), slo=1.0)
        assert join(coordinator, "b", AUTO, needs=needs(), slo=1.0).nodes["rollout"] == ["r7"]
    assert not event_log.of("hook_failed")


def test_a_coordinator_that_stops_ends_what_it_started(serve, eventually, tmp_path):
    coordinator = serve(on_nodes_idle=f"echo $$ > {tmp_path}/pid; sleep 600", idle_after=0.1)
    pid = eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    coordinator.stop()
    eventually(lambda: not _runs(pid))
