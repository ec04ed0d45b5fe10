"""Writes a server's output to a log file, or to a stream as text or JSON lines. Finds the cause of a failure in such
output."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from canvasrt.containers.logs import json_line, lines_to
from canvasrt.containers.serve.settings import Settings

_LOOK_EVERY = 0.2
_KEPT = 1000
LOG_BYTES = 64 * 2**20  # size at which a log is copied to FILE.1 and emptied
_GLOG = re.compile(r"([IWEF])\d{4} ")
# A line of canvasrt's own log in a model's process, in the format that `configure` sets.
_OURS = re.compile(r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")
_TAIL = 2**20  # bytes to read from a log's end
_CAUSES = (
    # The traceback follows on the same line, with escaped line breaks.
    re.compile(r"Failed to initialize Python stub: (?:CanvasError: )?(.*?)(?:\\n|\"?$)"),
    re.compile(r"^error: (.*)"),
    re.compile(r"^E\d{4} [^\"]*\"(.*)\""),
    re.compile(r"(.*(?:error while loading shared libraries|GLIBC_[\d.]+' not found).*)"),
)
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


class ServerOutput:
    """The output of one run. A context manager. `log` is the file; if it is None, servers write to `descriptor`, a pipe
    whose lines are copied to `stream`."""

    def __init__(self, settings: Settings, stream: TextIO) -> None:
        # The stream's reader can stall, which must not block this process.
        self._lines = lines_to(stream)
        self.log = settings.log_file
        self.descriptor: int | None = None
        self.recent: deque[str] = deque(maxlen=_KEPT)  # the last lines sent to the stream
        self._verbose = settings.verbose and self.log is not None
        self._json = settings.front.json_logs
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = 0  # how many bytes of the log were copied to the stream

    def __enter__(self) -> ServerOutput:
        if self.log is None:
            reader, self.descriptor = os.pipe()
            self._thread = threading.Thread(target=self._pass_on, args=(reader,), daemon=True)
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            # Rename an earlier server's log, but not a folder, a device or a link such as /dev/stdout.
            if self.log.is_file() and not self.log.is_symlink():
                self.log.replace(_older(self.log))
            with self.log.open("ab"):
                self._shown = self.log.stat().st_size
            self._thread = threading.Thread(target=self._tend, args=(self.log,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self._thread is not None:
            self._thread.join(timeout=2)
        # Later messages about the run must come after its log.
        for handler in (self._lines, *logging.getLogger().handlers):
            handler.flush()
        self._lines.close()

    def note(self, line: str) -> None:
        """Write a line of our own to the log."""
        if self.log is None:
            self._put(json_line("INFO", __name__, line) if self._json else line)
        else:
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    @property
    def is_seen(self) -> bool:
        """Whether the output's lines also appear on the terminal."""
        return self.log is None or self._verbose

    def _tend(self, log: Path) -> None:
        """Copy new lines of the log to the stream, if `verbose`, and rotate the log."""
        while True:
            last = self._done.is_set()
            with contextlib.suppress(OSError):  # a full disk, or a log that someone removed
                if self._verbose:
                    self._show(log)
                if log.stat().st_size > LOG_BYTES:
                    _rotate(log)
                    self._shown = 0
            if last:
                return
            self._done.wait(_LOOK_EVERY)

    def _show(self, log: Path) -> None:
        with log.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.decode(errors="replace").splitlines():
            self._put(line)
        self._shown += len(whole)

    def _pass_on(self, reader: int) -> None:
        """Copy tritonserver's lines to the stream, and keep the last lines. JSON output omits Triton's tables."""
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.rstrip()
                self.recent.append(text)
                if not self._json:
                    self._put(text)
                elif ours := _OURS.fullmatch(text):
                    self._put(json_line(ours[1], ours[2], ours[3]))
                elif text and text[0] not in "|+":
                    match = _GLOG.match(text)
                    level = _LEVELS[match[1]] if match else "INFO"
                    self._put(json_line(level, "tritonserver", text))

    def _put(self, line: str) -> None:
        self._lines.handle(logging.makeLogRecord({"msg": line}))


def _older(log: Path) -> Path:
    file = log.resolve()
    return file.with_name(f"{file.name}.1")


def _rotate(log: Path) -> None:
    """Copy a log to FILE.1 and truncate it. It cannot be renamed, because its writers keep it open."""
    with log.open("rb+") as file, _older(log).open("wb") as older:
        shutil.copyfileobj(file, older)
        file.truncate(0)


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log; empty if the log cannot be read, for example because it is a pipe."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def cause_in(lines: Sequence[str]) -> str:
    """Return the likely cause of a failure from log lines: a model's exception or, without one, an error of Triton."""
    for pattern in _CAUSES:
        for line in reversed(lines):
            match = pattern.search(line)
            if match:
                return match[1].strip()[:500]
    return ""
