"""The format of the log: plain lines, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import time

_MINUTE = 60.0


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, message, record.created)


def json_line(level: str, source: str, message: str, when: float | None = None) -> str:
    """Return a log line as JSON; `when` is in seconds since the epoch, None for now."""
    moment = time.time() if when is None else when
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{moment % 1:.3f}"[2:] + "Z"
    data = {"time": stamp, "level": level, "source": source, "message": message}
    return json.dumps(data, ensure_ascii=False)


class Seldom:
    """Logs one line a minute for each reason, however often the reason arises."""

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log, self._level = log, level
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, reason: str, message: str) -> None:
        """Log the message, with how many of its reason were left out before, unless there was one
        within a minute. There may only be few reasons."""
        now = time.monotonic()
        if now - self._last.get(reason, -_MINUTE) < _MINUTE:
            self._left_out[reason] = self._left_out.get(reason, 0) + 1
            return
        self._last[reason] = now
        count = self._left_out.pop(reason, 0)
        more = f" ({count} more since the last such line)" if count else ""
        self._log.log(self._level, "%s%s", message, more)


def configure(level: str, json_logs: bool) -> None:
    """Send this process's log to stderr."""
    level = "DEBUG" if level == "TRACE" else level  # Python has no TRACE
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_logs else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn.error", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
