"""`python -m verl_mux.warm.submitted URL MODULE ARGUMENTS...`: runs `python -m MODULE ARGUMENTS` as a job of Ray's job
server, follows its log, and ends as the job's driver ends. SIGINT and SIGTERM stop the job.

Runs in the place of a job's driver in `verl-mux run --submit`; started by run_processes.py, which puts the variables that the
job's processes get where a driver of Ray's looks for them. Talks to the job server only.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time

from ray.job_submission import JobStatus, JobSubmissionClient

from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.warm.fork_server import end_as

_POLL_S = 1.0


def main() -> None:
    url, *words = sys.argv[1:]
    name = f"{os.path.basename(os.getcwd())}-{os.environ[UID_VARIABLE][:8]}"  # no two starts have one name
    try:
        client = JobSubmissionClient(url)
        command = shlex.join([sys.executable, "-m", *words])
        client.submit_job(
            entrypoint=f"cd {shlex.quote(os.getcwd())} && exec {command}", submission_id=name,
            runtime_env=json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"],
        )  # fmt: skip
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"verl-mux: Ray's job server at {url} did not take the job: {str(error).splitlines()[0]}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: client.stop_job(name))
    asyncio.run(follow(client, name))
    while not (status := client.get_job_status(name)).is_terminal():
        time.sleep(_POLL_S)
    code = client.get_job_info(name).driver_exit_code
    end_as(code if code is not None else -signal.SIGTERM if status == JobStatus.STOPPED else 1)


async def follow(client: JobSubmissionClient, name: str) -> None:
    """Until the log ends. What the job does is not ours to break off when the connection to its log breaks."""
    try:
        async for text in client.tail_job_logs(name):
            print(text, end="", flush=True)
    except RuntimeError as error:
        print(f"verl_mux: the log of {name} is not followed any more: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
