"""Command output: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from canvasrt.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_SHOW_EVERY = 0.1  # seconds


def emit(data: Any, as_json: bool, render: Callable[[Console], None]) -> None:
    """Print a command's result: `data` as JSON, or what `render` draws on a console."""
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return
    render(console())


def emit_line(data: Any) -> None:
    """Print one line of a stream of JSON objects, at once."""
    print(json.dumps(data, ensure_ascii=False), flush=True)


def console(stderr: bool = False) -> Console:
    """Return a rich console that leaves text alone: no highlighting, no emoji codes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=True, width=width)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table: a header line and no frame."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    return drawn


def size(count: float) -> str:
    """Format a number of bytes: 2816 → `2.8 kB`."""
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def print_error(message: str, hint: str = "", log: Sequence[str] = ()) -> None:
    """Print the log that explains a failure, then the two lines that every failure ends in."""
    for line in log:
        print(line, file=sys.stderr)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for label, text, code in (("error", message, "1;31"), ("hint", hint, "1;36")):
        if text:
            name = f"\x1b[{code}m{label}:\x1b[0m" if colour else f"{label}:"
            print(name, " ".join(text.split()), file=sys.stderr)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, otherwise one line per kind of work."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
        return
    said: set[str] = set()

    def show_line(what: str, done: int, total: int) -> None:
        # Several kinds of work may run side by side and report in turn.
        if what not in said:
            said.add(what)
            print(what, file=sys.stderr, flush=True)

    yield show_line


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    shown = 0.0
    with Bars(*columns, console=console(stderr=True)) as bars:

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            elif time.monotonic() - shown < _SHOW_EVERY and done != total:
                return
            shown = time.monotonic()
            bars.update(tasks[what], completed=done, total=total or None)

        yield show
