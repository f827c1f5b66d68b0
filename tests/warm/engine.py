"""Starts a process as SGLang's Engine does, with its launcher wrapped as in an engine server."""

from __future__ import annotations

import multiprocessing
import os
import sys

import psutil

from verl_mux.warm.engine_processes import start_as_forks


def _scheduler(writer) -> None:
    writer.send([os.environ.get("LATER"), sorted(os.sched_getaffinity(0)), "numpy" in sys.modules, os.getpid()])


class Engine:
    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=run_scheduler_process_func, args=(writer,))
        process.start()
        said = reader.recv()
        process.join()
        return said


def launch() -> list:
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    original = Engine._launch_scheduler_processes.__func__
    later, cores, imported, pid = start_as_forks(
        original, Engine, server_args=None, port_args=None, run_scheduler_process_func=_scheduler
    )
    return [later, cores, imported, pid != os.getpid() and bool(family)]
