"""Starts a process as SGLang's Engine does, and two as vLLM's does, with what starts them wrapped as in an engine server."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

import psutil

from verl_mux.warm.engine_processes import give_forks, start_as_forks


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


def get_context():
    return multiprocessing.get_context("spawn")


def _core(writer, **keywords) -> None:
    context = sys.modules[__name__].get_context()
    reader, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_scheduler, args=(theirs,), daemon=True, name="worker")
    worker.start()
    os.environ["LATER"] = "too late"
    writer.send([reader.recv(), multiprocessing.current_process().name, "numpy" in sys.modules])
    worker.join()


def launch_core() -> list:
    give_forks([f"{__name__}.get_context"])
    reader, writer = multiprocessing.Pipe(duplex=False)
    core = get_context().Process(target=_core, name="core", kwargs={"writer": writer})
    core.start()
    (later, cores, imported, pid), *said = reader.recv()
    core.join()
    return [later, cores, imported, pid != core.pid, *said, core.exitcode]


def _stay(writer) -> None:
    writer.send([os.getpid()])
    threading.Event().wait()


def _stay_with_worker(writer) -> None:
    context = sys.modules[__name__].get_context()
    reader, theirs = context.Pipe(duplex=False)
    context.Process(target=_stay, args=(theirs,), daemon=True).start()
    writer.send([os.getpid(), *reader.recv()])
    threading.Event().wait()


def launch_and_stay() -> None:
    """Prints the pids of this process, its core, and the core's worker."""
    give_forks([f"{__name__}.get_context"])
    reader, writer = multiprocessing.Pipe(duplex=False)
    get_context().Process(target=_stay_with_worker, args=(writer,)).start()
    print(os.getpid(), *reader.recv(), flush=True)
    threading.Event().wait()
