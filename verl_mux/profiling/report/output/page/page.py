"""The report as one HTML file that needs nothing beside it: styles, scripts and data are inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_mux.profiling.plain.files import ROLES
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.data import page_data

_HERE = Path(__file__).parent
SCRIPTS = ["base.js", "time.js", "replay.js", "lanes.js", "life.js", "charts.js", "tables.js", "main.js"]  # in order of use


def make_page(analysis: Analysis, summary: dict[str, Any], solo: Analysis | None = None) -> str:
    """The page's text. It loads nothing, so it opens from a mail or a ticket, without a network.

    `solo`: another run; where it has the same jobs, the replay shows its phases as those of the jobs alone.
    """
    name = _name(analysis.run.directory.resolve())
    data = json.dumps(page_data(analysis, summary, name, solo), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": _escape(f"{name}: where the time went"),
        "style": (_HERE / "page.css").read_text(),
        "script": "\n".join((_HERE / script).read_text() for script in SCRIPTS),
        "data": data.replace("<", "\\u003c"),  # so that no name in the log can end the script element
    }
    text = (_HERE / "page.html").read_text()
    for key, value in parts.items():
        text = text.replace("{{" + key + "}}", value, 1)
    return text


def _name(directory: Path) -> str:
    """The run's or job's name, not that of a folder inside its log."""
    while directory.name in ("events", *ROLES) and directory.parent.name:
        directory = directory.parent
    return directory.name


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
