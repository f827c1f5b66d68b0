"""Files read into the host's page cache before a lease, so that a device is not held while a disk is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from huggingface_hub import snapshot_download

_BLOCK = 16 << 20
# Of the host's memory that is free: what is read must not push out what others need.
_SHARE = 0.5

log = logging.getLogger(__name__)


def weights_of(model: str) -> list[Path]:
    """The files with the weights of a Hugging Face model: of a folder, or of a name in the hub, if its files are here already."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # not here, or no such name
            return []
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def read_ahead(files: Iterable[Path], most: int | None = None) -> int:
    """Reads them once and keeps nothing. Returns bytes; at most `most` (default: half of the memory that is free).

    It skips a file that it cannot read: the process that loads the file reports the error.
    """
    started, left = time.perf_counter(), int(psutil.virtual_memory().available * _SHARE) if most is None else most
    total = 0
    for file in files:
        try:
            if file.stat().st_size > left - total:
                break
            with file.open("rb", buffering=0) as data:
                while block := data.read(_BLOCK):
                    total += len(block)
        except OSError as error:
            log.warning("%s was not read ahead: %s", file, error.strerror)
    log.info("read %d MB ahead in %.1f s", total >> 20, time.perf_counter() - started)
    return total
