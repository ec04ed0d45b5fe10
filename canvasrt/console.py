"""Command output: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from canvasrt.progress import Progress, listening

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
# Seconds between updates on a terminal, and between lines elsewhere.
_SHOW_EVERY, _SAY_EVERY = 0.1, 180.0
_WORD = 16  # cells of up to this many characters are not wrapped


# Whether the command was called with --json.
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def choose_json(value: bool) -> bool:
    """Set whether the command prints results as JSON; return the choice."""
    _as_json.set(value)
    return value


def emit(data: Any, render: Callable[[Console], None]) -> None:
    """Print a command's result: `data` as JSON if --json was given, else what `render` draws on a console."""
    if _as_json.get():
        print(_json(data, indent=2))
        return
    render(console())


def emit_line(data: Any) -> None:
    """Print one line of a stream of JSON objects, and flush."""
    print(_json(data), flush=True)


def _json(data: Any, indent: int | None = None) -> str:
    """Return `data` as JSON, in ASCII if the output is not UTF-8."""
    is_utf8 = str(sys.stdout.encoding).lower() == "utf-8"
    return json.dumps(data, indent=indent, ensure_ascii=not is_utf8)


def console(stderr: bool = False) -> Console:
    """Return a rich console that prints text unchanged: no markup, no highlighting, no emoji codes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if (
        os.environ.get("COLUMNS") == "0"
    ):  # some terminals set it, and rich would then print empty tables
        del os.environ["COLUMNS"]
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return Console(
        stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True, width=width
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table: a header line and no frame."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column, *cells in zip(columns, *rows, strict=True):
        # Columns with only short cells are not wrapped, unlike columns of sentences.
        whole = all(len(cell) <= _WORD and " " not in cell for cell in cells)
        least = max(map(len, column.split()), default=0)
        drawn.add_column(column, overflow="fold", no_wrap=whole, min_width=least)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def show_section(shown: Console, section: Mapping[str, Any]) -> None:
    """Print a section of a report: title, note and tables. Prints nothing if no table has rows."""
    for heads, rows in section["tables"]:
        if rows:
            shown.print(f"\n{section['title']}", style="bold")
            if section["note"]:
                shown.print(section["note"])
            shown.print(table(heads, rows))


def size(count: float) -> str:
    """Format a number of bytes: 2816 → `2.8 kB`."""
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Format a time: 5000 → `1 h 23 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def print_error(message: str, hint: str = "", log: Sequence[str] = ()) -> None:
    """Print the log that explains a failure, then the error and the hint."""
    for line in log:
        print(line, file=sys.stderr)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for label, text, code in (("error", message, "1;31"), ("hint", hint, "1;36")):
        if text:
            name = f"\x1b[{code}m{label}:\x1b[0m" if colour else f"{label}:"
            # Parts of the text come from files and servers, and must not control the terminal.
            shown = (c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
            print(name, "".join(shown), file=sys.stderr)


@contextlib.contextmanager
def progress(rate: bool = False) -> Iterator[None]:
    """Show progress reports from inside the `with` block on stderr: as bars on a terminal; otherwise as a line when
    each kind of work begins, and a line with the remaining time every few minutes.

    With `rate`, bars also show units per second.
    """
    if sys.stderr.isatty():
        with _bars(rate) as show, listening(show):
            yield
        return
    # For each kind of work (several may run concurrently): time and units of the first report; time of the last line.
    begun: dict[str, tuple[float, int]] = {}
    said: dict[str, float] = {}
    lock = threading.Lock()

    def show_line(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        with lock:
            start, before = begun.setdefault(what, (now, done))
            if what not in said:
                line = what
            elif before < done < total and now - said[what] >= _SAY_EVERY:
                left = duration((now - start) * (total - done) / (done - before))
                line = f"{what}: {done / total:.0%}, {left} left"
            else:
                return
            said[what] = now
            print(line, file=sys.stderr, flush=True)

    with listening(show_line):
        yield


@contextlib.contextmanager
def _bars(rate: bool) -> Iterator[Progress]:
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *((Rate(),) if rate else ()),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    shown = 0.0
    # The speed is estimated over half an hour, because one sweep of a calibration can take minutes.
    with Bars(*columns, console=console(stderr=True), speed_estimate_period=1800) as bars:

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if what not in tasks:
                for stage in (each for each in bars.tasks if each.total is None):
                    bars.update(stage.id, total=1, completed=1)
                # Units that were done before the first report do not count towards the speed.
                tasks[what] = bars.add_task(what, total=total or None, completed=done)
            elif time.monotonic() - shown < _SHOW_EVERY and done != total:
                return
            shown = time.monotonic()
            bars.update(tasks[what], completed=done, total=total or None)

        yield show
