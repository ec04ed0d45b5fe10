"""Updates the tables in the documentation that show files of `bench/results/`.

Above such a table is the comment `<!-- bench/results/FILE.json: KEY -->`. FILE may be a pattern: the table then has the
rows of all matching files, sorted by file name.
"""

from __future__ import annotations

import json
import re

from bench.results import ROOT, table

PAGES = sorted((ROOT / "docs").glob("*.md"))
_TABLE = re.compile(r"^(<!-- (bench/results/\S+\.json): (.+) -->\n)(?:\|.*\n)*", re.MULTILINE)


def measure() -> None:
    """Rewrite all tables."""
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")


def filled(text: str) -> str:
    """Return a page with its tables rewritten from the current files."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], found[3])}\n", text)


def _table(pattern: str, key: str) -> str:
    files = sorted(ROOT.glob(pattern))
    if not files:
        raise FileNotFoundError(pattern)
    return table([row for file in files for row in json.loads(file.read_text())["figures"][key]])
