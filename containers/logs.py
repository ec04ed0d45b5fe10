"""The format of the log: plain lines, or one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import sys
import time
from typing import TextIO

_MINUTE = 60.0
_PATIENCE = 1.0  # maximum seconds to wait for the log's reader at exit


class JsonLines(logging.Formatter):
    """Formats records as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, message, record.created)


def json_line(level: str, source: str, message: str, when: float | None = None) -> str:
    """Return a log line as JSON. `when`: seconds since the epoch; None means now."""
    moment = time.time() if when is None else when
    stamp = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1000):03}Z"
    )
    data = {"time": stamp, "level": level, "source": source, "message": message}
    return json.dumps(data, ensure_ascii=False)


class Seldom:
    """Logs at most one line per minute for each reason."""

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log, self._level = log, level
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, reason: str, message: str) -> None:
        """Log the message, unless a message with the same reason was logged in the last minute. The line also says how
        many messages with this reason were left out since the last line. The number of reasons must be small."""
        now = time.monotonic()
        if now - self._last.get(reason, -_MINUTE) < _MINUTE:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        self._last[reason] = now
        count = self._left_out.pop(reason, 0)
        more = f" ({count} more since the last such line)" if count else ""
        self._log.log(self._level, "%s%s", message, more)


class Patient(logging.handlers.QueueHandler):
    """Formats records and passes them, on a separate thread, to a handler that can block. Drops records that do not fit
    in the queue, and logs their number."""

    def __init__(self, handler: logging.Handler, most: int = 10_000) -> None:
        self.records: queue.Queue[logging.LogRecord] = queue.Queue(most)
        super().__init__(self.records)
        self.dropped = 0
        self._listener = _Counting(self, handler)
        self._listener.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait at most _PATIENCE seconds until the reader has all records."""
        end = time.monotonic() + _PATIENCE
        while self.records.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._listener.enqueue_sentinel()
        super().close()


class _Counting(logging.handlers.QueueListener):
    def __init__(self, of: Patient, handler: logging.Handler) -> None:
        super().__init__(of.records, handler)
        self._of, self._told = of, 0

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        if missing := self._of.dropped - self._told:
            self._told += missing
            text = f"{missing} lines of the log were dropped, because its reader was too slow"
            told = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            record = logging.makeLogRecord({**told, "msg": text})
            super().handle(self._of.prepare(record))


def lines_to(stream: TextIO) -> Patient:
    """Return a handler that writes messages as lines to a stream."""
    return Patient(logging.StreamHandler(stream))


def configure(level: str | int, json_logs: bool) -> None:
    """Send this process's log to stderr. Logging never blocks on a slow reader."""
    level = "DEBUG" if level == "TRACE" else level  # Python has no level TRACE
    handler = lines_to(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_logs else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn.error", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
