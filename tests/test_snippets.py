"""Every snippet of the README runs as printed, in order, in a separate network namespace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt.checkpoints.locate import demo_checkpoint
from tests.helpers.serving import needs_triton

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# In a new network namespace, all ports are free. The kernel must permit creating one.
NETWORK = ["unshare", "--map-root-user", "--net"]
# Printed command → how the test runs it: it waits, provides input, or does without a GPU or a daemon.
ADDED = {
    "canvasrt serve cpu": "{0} >serve.log 2>&1 & until curl -sf localhost:8000/v1/health/ready; "
    "do kill -0 $! || {{ cat serve.log; exit 9; }}; sleep 0.2; done",
    "canvasrt chat": "echo 'reverse planet' | {0}",
    "canvasrt deploy image": "{0} --print",
}
BATCH = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "canvasrt", "messages": [{"role": "user", "content": "12+34="}]},
}
QUESTIONS = """questions:
- {type: choice, instructions: "What is the sum?", choices: [{value: "46"}, {value: "45"}]}
"""
# Builds that the test only plans, since it lacks the GPU or the time.
PLANNED = re.compile(r"^canvasrt build .*--target (?!cpu )")


def blocks() -> list[str]:
    """Return the README's blocks of code."""
    return re.findall(r"^```\w*\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)


def commands(block: str) -> list[str]:
    """Return a block's commands, with continued lines joined and without comments."""
    joined = re.findall(
        r"^(?:curl|canvasrt|make)\b.*?(?=^(?:curl|canvasrt|make)\b|\Z)", block, re.M | re.S
    )
    assert "".join(joined) == block, f"not a command: {block!r}"
    return [re.sub(r"\s+#.*$", "", each.strip(), flags=re.M) for each in joined]


def runnable(command: str) -> str:
    """Return the form of a command that this test runs."""
    if command.startswith("make "):
        return f"make -C {ROOT} -n {command.removeprefix('make ')}"
    if PLANNED.match(command) and "build small" not in command:
        command = command.replace("CHECKPOINT", "demo")
        return command if "--dry-run" in command else f"{command} --dry-run"
    for start, pattern in ADDED.items():
        if command.startswith(start):
            return pattern.format(command)
    if command.startswith("curl -s "):
        return f"{command.replace('curl -s ', 'curl -sS --fail-with-body --max-time 60 ', 1)}; echo"
    return command


def test_every_snippet_is_one_of_commands() -> None:
    found = [command for block in blocks() for command in commands(block)]
    assert sum(each.startswith("curl ") for each in found) >= 2
    assert sum(each.startswith("canvasrt ") for each in found) >= 15


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@needs_triton
@pytest.mark.skipif(
    not all(map(shutil.which, ("curl", "ip", "unshare")))
    or subprocess.run([*NETWORK, "true"], capture_output=True).returncode != 0,
    reason="curl, ip or `unshare --net` is missing",
)
@pytest.mark.skipif(
    not (demo_checkpoint() / "config.json").exists(),
    reason="the demo checkpoint is not in this checkout",
)
def test_every_snippet_runs(tmp_path: Path) -> None:
    (tmp_path / "questions.yaml").write_text(QUESTIONS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12+34="}\n{"prompt": "reverse planet"}\n')
    (tmp_path / "q.jsonl").write_text(json.dumps(BATCH) + "\n")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    lines = ["set -euo pipefail", "ip link set lo up", "trap 'kill $(jobs -p); wait' EXIT"]
    for block in blocks():
        for command in commands(block):
            shown = command.replace("'", "'\\''")
            lines += [f"echo '### {shown}' >&2", runnable(command)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in [each for each in environment if each.lower().endswith("_proxy")]:
        del environment[name]
    done = subprocess.run(
        [*NETWORK, "bash", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1780,
    )
    assert done.returncode == 0, f"{done.stderr[-4000:]}\n{done.stdout[-2000:]}"
    assert done.stdout.count('"object":"chat.completion"') == 1
    assert "tenalp" in done.stdout
    assert "\npurple\n" in done.stdout
