"""The log's form: lines for a reader, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        said = record.getMessage()
        if record.exc_info:
            said += "\n" + self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, said, record.created)


def json_line(level: str, source: str, message: str, when: float | None = None) -> str:
    """A log line as JSON."""
    moment = time.time() if when is None else when
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{moment % 1:.3f}"[2:] + "Z"
    data = {"time": stamp, "level": level, "source": source, "message": message}
    return json.dumps(data, ensure_ascii=False)


def configure(level: str, json_logs: bool) -> None:
    """Sends what this process logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_logs else plain)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn.error", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
