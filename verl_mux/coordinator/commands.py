"""`verl-mux coordinator`, `status`, `keys`, `evict` and `release`.

The first runs a coordinator in this process; the others ask one over its socket, or write key files. Other commands take
`Address`, `Keys` and `fetch_status` from here.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from verl_mux.coordinator import status_view
from verl_mux.coordinator.bus import curve_keys as bus_keys
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.client import ADDRESS_VARIABLE
from verl_mux.coordinator.bus.link import ask
from verl_mux.coordinator.config import read_config
from verl_mux.errors import Failure, UserError

if TYPE_CHECKING:
    from verl_mux.coordinator.server import Coordinator

DEFAULT_ADDRESS = "tcp://127.0.0.1:5570"
_Answer = TypeVar("_Answer", bound=m.Message)

Keys = Annotated[
    Path | None,
    typer.Option(
        envvar=bus_keys.KEYS_VARIABLE, help="Folder of the coordinator's keys; on one machine by default its user's own."
    ),
]
_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
ANSWER_S = 5.0  # to wait for a coordinator's answer
Address = Annotated[str, typer.Option("--coordinator", "--address", envvar=ADDRESS_VARIABLE, help="The coordinator's address.")]


def coordinator(
    config: Annotated[Path, typer.Option(help="YAML file with `pools:` and, if wanted, `schedule:`.")],
    bind: Annotated[str, typer.Option(help="Where to listen; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    journal: Annotated[
        Path | None, typer.Option(help="File that lets a restart remember all leases; default: one in ~/.local/state/verl_mux.")
    ] = None,
    no_journal: Annotated[bool, typer.Option("--no-journal", help="Remember nothing across a restart.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Directory for the event log.")] = None,
    keys: Keys = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics for Prometheus here, instead of the file's `metrics_port`; 0: a free port.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="The address for /metrics; 0.0.0.0: all interfaces.")] = "127.0.0.1",
) -> None:
    """Serve leases to jobs until interrupted; SIGHUP reads the pools in the file again."""
    from verl_mux.coordinator.journal_files import default_path
    from verl_mux.coordinator.server import Coordinator

    if no_journal and journal is not None:
        raise UserError(f"--journal {journal} and --no-journal were both given; choose one")
    settings = read_config(config)
    event_log = _event_log(log_dir)
    where = None if no_journal else journal or default_path(config, bind)
    service = Coordinator(settings, where, bind, event_log, keys, lambda: read_config(config))
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    port = settings.metrics_port if metrics_port is None else metrics_port
    with contextlib.ExitStack() as stack:
        if port is not None:
            from verl_mux.coordinator.prometheus import METRICS, Figures, coordinator_samples, serve_metrics

            figures = Figures(METRICS, lambda: coordinator_samples(service.snapshot()))
            stack.enter_context(serve_metrics(figures, port, metrics_host))
        _serve(service, enough, event_log)


def _reload(service: Coordinator) -> None:
    try:
        answer = f"read again; {service.reload()}"
    except (UserError, Failure) as error:
        answer = f"verl-mux: {error}"
    with contextlib.suppress(OSError):  # SIGHUP comes also when the terminal is closed
        print(answer, file=sys.stderr, flush=True)


def _serve(service: Coordinator, enough: threading.Event, event_log: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each client's connection is an open file
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
    print(f"verl-mux coordinator at {service.start()} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    signal.signal(signal.SIGHUP, lambda *_: _reload(service))
    print("\n".join(status_view.memory(service.snapshot())), file=sys.stderr, flush=True)
    try:
        service.wait(enough)
    finally:
        service.stop()
        if event_log is not None:
            event_log.close()


def make_log_folder(directory: Path) -> None:
    """Raises UserError where it cannot be made; later, a log that cannot be written is no error."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log-dir {directory}: cannot make this folder: {error.strerror}") from None


def _event_log(directory: Path | None) -> Any:
    if directory is None:
        return None
    make_log_folder(directory)
    from verl_mux.profiling.eventlog.log import EventLog

    return EventLog(directory, role="coordinator", job="coordinator")


def status(
    address: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a coordinator which job runs which phase, and which jobs wait."""
    from rich.console import Console  # the coordinator itself does without

    console, seen = Console(), fetch_status(address, ANSWER_S, keys)
    if json:  # which has no infinity and NaN, which a job's metrics may be: msgspec writes null
        print(msgspec.json.encode(seen).decode())
    elif console.is_terminal:
        console.print(status_view.tables(seen))
    else:
        print(status_view.plain(seen))


def fetch_status(address: str, timeout: float, keys: Path | None = None) -> dict[str, Any]:
    """One snapshot. Raises UserError when no coordinator answers within `timeout` seconds, or it refuses these keys."""
    return _ask(address, m.StatusRequest(), timeout, keys, bus_keys.VIEWER, m.Status).snapshot


def _ask(address: str, message: m.Message, timeout: float, keys: Path | None, role: str, wanted: type[_Answer]) -> _Answer:
    answer = ask(address, message, timeout, bus_keys.for_address(address, keys, role))
    if answer is None:
        raise UserError(f"no coordinator answers at {address} (waited {timeout:g} s)")
    if not isinstance(answer, wanted):
        raise UserError(f"the coordinator at {address} refuses: {getattr(answer, 'reason', answer)}")
    return answer


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Make the keys of a coordinator and of its clients."""
    bus_keys.make(directory)
    print(f"keys in {directory}: server for the coordinator, {', '.join(bus_keys.ROLES)} for its clients", file=sys.stderr)


def evict(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
) -> None:
    """End a job as if it had failed; its nodes are given on when its processes are gone."""
    if not yes:
        _confirm(f"End job {job!r}? What it has not saved is lost.", job, _names(coordinator, keys)[:1])
    _say(m.Evict(job=job), coordinator, keys)


def release(
    name: Annotated[str, typer.Argument(help="A job that is ending, or a node or host of one.")],
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    yes: _Yes = False,
) -> None:
    """Free what an ending job holds on hosts that the coordinator cannot see. Look there first: is none of its processes left?"""
    if not yes:
        question = f"Is nothing of it left on the hosts of {name!r}? Others get its nodes at once."
        _confirm(question, name, _names(coordinator, keys))
    _say(m.Free(name=name), coordinator, keys)


def _names(address: str, keys: Path | None) -> list[tuple[str, list[str]]]:
    """Of jobs, of nodes and of hosts, as the coordinator knows them."""
    seen = _ask(address, m.StatusRequest(), ANSWER_S, keys, bus_keys.OPERATOR, m.Status).snapshot
    nodes = {node: at["host"] for pool in seen["pools"].values() for node, at in pool["nodes"].items()}
    looked_at = [name for host, at in seen["hosts"].items() for name in (host, *at["addresses"])]
    return [("job", list(seen["jobs"])), ("node", list(nodes)), ("host", list(filter(None, (*nodes.values(), *looked_at))))]


def _confirm(question: str, name: str, known: list[tuple[str, list[str]]]) -> None:
    """Of a name that the coordinator knows: once for yes or no, once more for the name."""
    if not any(name in names for _, names in known):
        there = "; ".join(f"{kind}s: {', '.join(dict.fromkeys(names)) or 'none'}" for kind, names in known)
        raise UserError(f"no {' or '.join(kind for kind, _ in known)} {name!r} is known there; {there}")
    if not sys.stdin.isatty():
        raise UserError("it asks before it acts, and no terminal is here to answer: it needs --yes")
    if not typer.confirm(question) or typer.prompt("Its name once more") != name:
        raise UserError("nothing was done")


def _say(message: m.ByHand, address: str, keys: Path | None) -> None:
    print(_ask(address, message, ANSWER_S, keys, bus_keys.OPERATOR, m.Done).text)
