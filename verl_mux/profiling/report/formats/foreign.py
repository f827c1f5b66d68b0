"""Files of other programs become an event log: what each is shows in its first lines, never in its name. Runs on the command
line; called by report_command.py; reads these files, writes an event log into a folder that its caller gives.

A file of lines may hold several kinds (a console with verl's metrics among SGLang's requests); a line of no kind is passed
over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError
from verl_mux.profiling.report.formats import otlp, ray_timeline, sglang_requests, verl_metrics

HEAD = 2**16
ALLOWED = (
    "give a directory of event logs, or files of OTLP JSON, of verl's console or wandb history, of SGLang's "
    "--log-requests, or of `ray timeline`"
)


def write_as_log(source: Path, directory: Path) -> int:
    """Write what a file, or the files of a folder, hold as `<directory>/<role>/step_<N>/worker_<R>.jsonl`; return the count.

    Raises UserError where nothing of it is known.
    """
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    lines: list[dict[str, Any]] = []
    finished: list[sglang_requests.Finished] = []
    for path in paths:
        try:
            with open(path, "rb") as raw:
                head = raw.read(HEAD)
            if b'"resourceSpans"' in head:
                lines += otlp.read_lines(path)
            elif head.lstrip()[:1] == b"[" and b'"ph"' in head:
                lines += ray_timeline.read_lines(path)
            elif b"\0" not in head:
                with open(path, encoding="utf-8", errors="replace") as texts:
                    lines += _of_texts(texts, path.stem, finished)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
    lines += sglang_requests.lines(finished)
    if not lines:
        raise UserError(
            f"{source} holds no event log (step_<N>/worker_<R>.jsonl) and no file of another kind: nothing to report; {ALLOWED}"
        )
    _write(lines, directory)
    return len(lines)


def _of_texts(texts: Iterable[str], name: str, finished: list[sglang_requests.Finished]) -> Iterator[dict[str, Any]]:
    clock = verl_metrics.Clock()
    for text in texts:
        if (request := sglang_requests.parse(text, name)) is not None:
            finished.append(request)
        else:
            yield from clock.lines(text)


def _write(lines: list[dict[str, Any]], directory: Path) -> None:
    files: dict[Path, list[tuple[str, str]]] = {}
    for line in lines:
        path = directory / line["role"] / f"step_{line['step']}" / f"worker_{line['workid']}.jsonl"
        files.setdefault(path, []).append((line["timestamp"], json.dumps(line)))
    for path, texts in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(text + "\n" for _, text in sorted(texts, key=lambda text: text[0])))
