"""A model's `config.json`, from a folder or by its name on a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError


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
