"""A model's files: its `config.json`, from a folder or by its name on a hub, and its weights, read ahead.

Runs on the command line and in the driver (`config.json`), in training workers (weights). Touches files and the hub.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError
from verl_mux.platform.host_memory import room

_BLOCK = 16 << 20
# Of the host's memory that is free: what is read must not push out what others need.
_SHARE = 0.5

log = logging.getLogger(__name__)


def local_model_config(path: str) -> dict[str, Any] | None:
    """Of a model in a folder; None: there is none."""
    try:
        return json.loads((Path(path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None


def known_model_config(path: str) -> dict[str, Any] | None:
    """As `read_model_config`, but a hub is asked once where a download would ask for half a minute. None: it is not to be had."""
    found = local_model_config(path)
    return found if found is not None or not _is_at_hand(path) else read_model_config(path, "check")


def _is_at_hand(name: str) -> bool:
    """On this machine, or on a hub that answers."""
    import httpx
    from huggingface_hub import HfApi, hf_hub_download

    try:
        hf_hub_download(name, "config.json", local_files_only=True)
        return True
    except ValueError:  # no name
        return False
    except OSError:
        try:
            return HfApi().file_exists(name, "config.json")
        except (httpx.HTTPError, OSError):
            return False


def read_model_config(path: str, what_for: str = "estimate phase times from") -> dict[str, Any]:
    """Raises UserError: there is none in that folder, or none that can be fetched by that name."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        # Slow to import, and needed only for a model that is not here as a folder.
        from huggingface_hub import hf_hub_download

        if not _is_at_hand(path):  # asked once; a download asks for half a minute
            way_out = "a folder with a config.json will do, such as those under recipes/models"
            raise UserError(f"actor_rollout_ref.model.path={path}: no model config to {what_for}: no hub here has it; {way_out}")

        try:
            file = Path(hf_hub_download(path, "config.json"))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"actor_rollout_ref.model.path={path}: no model config to {what_for}: {reason}") from None
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no model config to {what_for}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is no model config to {what_for}: an object is expected, given is a {type(found).__name__}")
    return found


def weights_of(model: str) -> list[Path]:
    """The files with the weights of a Hugging Face model: of a folder, or of a name in the hub, if its files are here already."""
    from huggingface_hub import snapshot_download

    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # not here, or no such name
            return []
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def read_ahead(files: Iterable[Path], most: int | None = None) -> int:
    """Read files once into the host's page cache, so that a device is not held while a disk is read.

    Returns bytes; at most `most` (default: half of the memory that is free). A file that cannot be read is skipped: the process
    that loads it reports the error.
    """
    started, left = time.perf_counter(), int(room().available * _SHARE) if most is None else most
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
