"""Log lines as plain text and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

from canvasrt.containers.logs import json_line
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.output import ServerOutput
from canvasrt.containers.serve.settings import Settings

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


def test_the_models_lines_keep_their_levels_as_json():
    """Otherwise, a failed pass would be logged as INFO and cause no alert."""
    shown = io.StringIO()
    settings = Settings(front=FrontOptions(json_logs=True))
    with ServerOutput(settings, shown) as output:
        assert output.descriptor is not None
        os.write(output.descriptor, b"2026-11-28 20:44:33,230 ERROR a.b: a pass failed: 1\n")
        os.write(output.descriptor, b'  File x\nW1128 20:44:33.1 1 a.cc:1] "w"\n')
    lines = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["ERROR", "INFO", "WARNING"]
    assert (lines[0]["source"], lines[0]["message"]) == ("a.b", "a pass failed: 1")
