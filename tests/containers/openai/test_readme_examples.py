"""The calls of the OpenAI API in the README and docs/api.md work as printed, with the shared server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.serving import needs_triton

pytestmark = [
    pytest.mark.acceptance,
    needs_triton,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/api.md")


def calls() -> list[str]:
    """Return every call in the pages to the API on port 8000."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
            for part in re.split(r"^(?=curl )", block, flags=re.M):
                if part.startswith("curl -s localhost:8000/v1/"):
                    found.append(part)
    return found


def test_the_pages_have_calls() -> None:
    assert sum("/v1/decisions" in call for call in calls()) >= 1
    assert sum("json_schema" in call for call in calls()) >= 1


@pytest.mark.parametrize("call", calls())
def test_a_call_works_as_printed(front: FrontEnd, call: str) -> None:
    here = call.replace("localhost:8000/v1", front.url.removeprefix("http://"))
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120)
    reply = json.loads(done.stdout)
    assert "error" not in reply, reply
    if "/infill" in call:
        assert reply["text"] == f"te{reply['gaps'][0]}p"
    if "json_schema" in call:
        found = json.loads(reply["choices"][0]["message"]["content"])
        sent = json.loads(call[call.index("-d '") + 4 : call.rindex("'")])
        jsonschema.validate(found, sent["response_format"]["json_schema"]["schema"])
        assert isinstance(found, int) or set(found) == {"sum"}
    if "/decisions" in call:
        assert sum(each["probability"] for each in reply["answers"][0]["probabilities"]) > 0.999
