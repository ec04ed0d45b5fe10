"""The scripts in clients/ work with the clients of docs/clients.md, installed as users install them.

They set the temperature to 0, since with one seed in 700, the demo answers 45.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from canvasrt.bundle import load_bundle
from tests.helpers import library
from tests.helpers.client_environments import environment
from tests.helpers.scripted import Script, gemma_template, serving, write_bundle
from tests.helpers.serving import needs_triton

SCRIPTS = Path(__file__).parent / "clients"
ROW = re.compile(r"^\| \[.+?\]\(\.\./tests/containers/openai/clients/(.+?)\) \| `(.+?)` \|", re.M)
COMMAND = '<|tool_call>call:exec_command{cmd:<|"|>echo 46<|"|>}<tool_call|><|tool_response>'


class Client(NamedTuple):
    """A row of the page: the name of a script, and the command that installs its client."""

    script: str
    install: str


CLIENTS = [Client(*row) for row in ROW.findall(Path("docs/clients.md").read_text("utf-8"))]


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with serving(load_bundle(library.bundle("demo"), check=False)) as served:
        yield served.front.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model calls a tool and then ends, whatever the tool returns. Codex needs it, since its prompts are
    too long for the demo."""
    script = Script({"runs a command": [COMMAND, "It is done."]})
    graphs = tmp_path_factory.mktemp("coder") / "graphs"
    with serving(write_bundle(graphs, script, gemma_template())) as served:
        yield served.front.url.removesuffix("/v1")


def test_every_script_has_a_row() -> None:
    assert sorted(each.script for each in CLIENTS) == sorted(os.listdir(SCRIPTS))


@needs_triton
@pytest.mark.acceptance
@pytest.mark.parametrize("client", CLIENTS, ids=lambda each: each.script)
def test_a_real_client(request: pytest.FixtureRequest, client: Client) -> None:
    folder = environment(client.install)
    variables = {
        "BASE": request.getfixturevalue("coder" if client.script == "codex.mjs" else "demo"),
        "SITE_PACKAGES": sysconfig.get_paths()["purelib"],
        # Without these, clients first try to reach the network.
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "no_proxy": "*",
    }
    script = SCRIPTS / client.script
    # node finds packages in the current folder only if it reads the script from standard input.
    python = script.suffix == ".py"
    command = [folder / "bin/python", "-I", script] if python else ["node", "--input-type=module"]
    done = subprocess.run(
        command,
        input=None if python else script.read_text("utf-8"),
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
