"""Every socket that listens is in the table of docs/security.md, and nothing else is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTENS = re.compile(
    r"\.listen\(|create_server\(|make_server\(|start_(unix_)?server\(|HTTPServer\(|nixl_agent\(|Listener\("
    r"|zmq\.(ROUTER|REP|PULL|PUB|XPUB|XSUB|STREAM)\)"
)


def test_the_table_names_all_that_listens():
    found = {
        path.relative_to(ROOT / "verl_mux").as_posix()
        for path in (ROOT / "verl_mux").rglob("*.py")
        if LISTENS.search(path.read_text())
    }
    table = (ROOT / "docs" / "security.md").read_text().partition("## What listens")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\S+\.py)`", table)) == found
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > len(found) and all(len(row) == 4 and all(row) for row in rows)
    assert not any(LISTENS.search(path.read_text()) for path in (ROOT / "verl_mux_cpu").rglob("*.py"))
