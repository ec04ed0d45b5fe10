"""`canvasrt demo`: right answers over every protocol, and no files or shared memory left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.cli.demo import DECISIONS, DEMO_PROMPTS, SUM_SCHEMA, judge
from canvasrt.demo.tasks import is_correct, task_of
from canvasrt.errors import CanvasError
from tests.helpers import library
from tests.helpers.serving import needs_triton

needs_checkpoint = pytest.mark.skipif(
    not (demo_checkpoint() / "config.json").exists(),
    reason="the demo checkpoint is not in this checkout",
)


def start(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """Start `canvasrt demo` with a separate folder for temporary files."""
    (folder / "tmp").mkdir()
    # Not with `python -m`: if KeyboardInterrupt has passed through an exec() (such as a dataclass's during an import),
    # Python then ends itself with SIGINT, whatever the exit code.
    command = Path(sys.executable).with_name("canvasrt")
    return subprocess.Popen(
        [command, "demo", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_by(process: subprocess.Popen[str], folder: Path) -> list[str]:
    # Only canvasrt's folders count: torch creates its cache folder there, too.
    scratch = (folder / "tmp").glob("canvasrt*")
    shared = Path("/dev/shm").glob(f"canvasrt-*-{process.pid}-*")
    return [each.name for each in (*scratch, *shared)]


@needs_triton
@needs_checkpoint
@pytest.mark.acceptance
def test_the_demo_answers_its_questions(tmp_path: Path):
    process = start(tmp_path, "--json", "--keep", str(tmp_path / "kept"))
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    data = json.loads(output)
    assert [row["question"] for row in data["rows"]] == list(DEMO_PROMPTS)
    for row in data["rows"]:
        assert row["http"] == row["grpc"] == row["openai"]
        assert row["right"] == is_correct(row["question"], row["http"])
    assert data["right"] >= 6
    assert [each["question"] for each in data["decisions"]] == list(DECISIONS)
    assert all(each["right"] for each in data["decisions"])
    jsonschema.validate(json.loads(data["json"]["answer"]), SUM_SCHEMA)
    assert data["json"]["answer"] == "46"
    assert (tmp_path / "kept" / "package" / "manifest.json").exists()
    assert not left_by(process, tmp_path)


@needs_triton
@needs_checkpoint
@pytest.mark.acceptance
@pytest.mark.parametrize("during", ["exporting graphs", "asking"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, during: str):
    process = start(tmp_path, CANVASRT_CACHE=str(library.empty_cache(tmp_path / "cache")))
    assert process.stderr is not None
    assert any(line.startswith(during) for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not left_by(process, tmp_path)


def test_it_asks_a_question_of_every_task():
    from canvasrt.demo.tasks import TASKS

    assert {task_of(question).name for question in DEMO_PROMPTS} == set(TASKS)


def row(http: str = "4", grpc: str = "4", openai: str = "4", right: bool = True) -> dict[str, Any]:
    return {"question": "2+2=", "http": http, "grpc": grpc, "openai": openai, "right": right}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(right=False)] * 3 + [row()] * 5, "3 of 8 answers are wrong"),
        ([row(grpc="5")], "'4' over HTTP, '5' over gRPC and '4' over the OpenAI"),
        ([row(openai="5")], "'4' over gRPC and '5' over the OpenAI"),
    ],
)
def test_three_wrong_answers_or_one_difference_are_not_forgiven(rows: list[Any], said: str):
    judge([row()] * 7 + [row(right=False)])
    with pytest.raises(CanvasError, match=said):
        judge(rows)
