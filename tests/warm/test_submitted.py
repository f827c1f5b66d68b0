"""What follows a job of Ray's job server ends as that job's driver ends. A real job server: tests/e2e/test_multiplexed_run.py."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from ray.job_submission import JobStatus

from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.warm import submitted

RUNTIME = {"env_vars": {"COLOUR": "blue"}}


class Client:
    """A job server's; `end`: a job's status and its driver's exit code when its log has ended. A signal comes before that."""

    end: tuple[JobStatus, int | None] = (JobStatus.SUCCEEDED, 0)
    number: signal.Signals | None = None
    refuses = False

    def __init__(self, url: str) -> None:
        self.submitted: dict = {}
        self.stopped: list[str] = []
        Client.made = self

    def submit_job(self, **job) -> None:
        if self.refuses:
            raise RuntimeError("no room\nfor it")
        self.submitted = job

    async def tail_job_logs(self, name: str):
        yield "step 1\n"
        if self.number is not None:
            os.kill(os.getpid(), self.number)
        if self.end[0] == JobStatus.FAILED:
            raise RuntimeError("the connection closed")

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)

    def get_job_status(self, name: str) -> JobStatus:
        return self.end[0]

    def get_job_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(driver_exit_code=self.end[1])


@pytest.fixture
def follow(monkeypatch, tmp_path):
    """Submits a job with this client; gives the client and what this process would have ended as."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "math").mkdir()
    monkeypatch.chdir(tmp_path / "math")
    monkeypatch.setenv(UID_VARIABLE, "0123456789")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": RUNTIME}))
    monkeypatch.setattr("sys.argv", ["submitted", "http://h:8265", "verl.trainer.main_ppo", "data.train_files=a b"])
    ended: list[int] = []
    monkeypatch.setattr(submitted, "end_as", ended.append)

    def followed(**attributes) -> tuple[Client, list[int]]:
        monkeypatch.setattr(submitted, "JobSubmissionClient", type("Other", (Client,), attributes))
        submitted.main()
        return Client.made, ended

    yield followed
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("end", "code"),
    [((JobStatus.SUCCEEDED, 0), 0), ((JobStatus.FAILED, 3), 3), ((JobStatus.FAILED, -9), -9), ((JobStatus.FAILED, None), 1),
     ((JobStatus.STOPPED, None), -signal.SIGTERM)],
)  # fmt: skip
def test_it_ends_as_the_jobs_driver_whatever_became_of_its_log(follow, capsys, end, code):
    client, ended = follow(end=end)
    assert ended == [code] and capsys.readouterr().out == "step 1\n"
    assert client.submitted["entrypoint"].endswith("-m verl.trainer.main_ppo 'data.train_files=a b'")
    assert client.submitted["entrypoint"].startswith(f"cd {os.getcwd()} && exec ")
    assert (client.submitted["submission_id"], client.submitted["runtime_env"]) == ("math-01234567", RUNTIME)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job(follow, number):
    client, _ = follow(number=number, end=(JobStatus.STOPPED, None))
    assert client.stopped == ["math-01234567"]


def test_a_job_server_that_does_not_take_the_job_is_named_in_one_line(follow):
    with pytest.raises(SystemExit, match="^verl-mux: Ray's job server at http://h:8265 did not take the job: no room$"):
        follow(refuses=True)
