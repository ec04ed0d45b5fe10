"""Lines of the log, as plain text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from canvasrt.containers.logs import json_line

_LOGS = """
import logging
from canvasrt.containers.logs import configure
configure("INFO", json_logs={})
logging.getLogger("a.b").warning("%d of %s", 1, "two")
"""


def _line(json_logs: bool) -> str:
    code = _LOGS.format(json_logs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr


def test_a_line_has_its_message_once():
    assert _line(json_logs=False).endswith(" WARNING a.b: 1 of two\n")
    line = json.loads(_line(json_logs=True))
    assert (line["level"], line["source"], line["message"]) == ("WARNING", "a.b", "1 of two")


def test_a_time_is_never_rounded_up_to_the_next_second():
    line = json.loads(json_line("INFO", "a.b", "c", when=1.9996))
    assert line["time"] == "1970-01-01T00:00:01.999Z"
