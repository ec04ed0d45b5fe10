"""`canvasrt generate` and `canvasrt bench`, run as users do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt.cli.app import run


def on_a_terminal(*arguments: object) -> str:
    """Return everything that a command writes to a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "canvasrt", *map(str, arguments)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        # Reading fails once the other end is closed.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                written += part
    os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that succeeds, in this process; return its standard output."""
    assert run([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that fails; return its `error:` line, which one `hint:` line follows."""
    assert run([str(a) for a in arguments]) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    return lines[0]


def test_json_holds_what_is_promised(demo, capsys) -> None:
    data = json.loads(ask(capsys, "generate", demo.bundle, "17+25=", "--seed", 3, "--json"))
    chat = [{"role": "user", "content": "17+25="}]
    assert data["prompt_token_ids"] == demo.tokenizer.encode_chat(chat)
    assert data["text"] == demo.tokenizer.decode(data["token_ids"])
    assert data["finish_reason"] == "stop"
    assert data["seed"] == 3
    assert len(data["steps"]) == 1
    assert ask(capsys, "generate", demo.bundle, "17+25=", "--seed", 3) == data["text"] + "\n"


def test_streams_end_in_the_same_answer(demo, capsys) -> None:
    arguments = ["generate", demo.bundle, "count 7 to 31", "--max-new-tokens", 96]
    whole = json.loads(ask(capsys, *arguments, "--json"))
    assert ask(capsys, *arguments, "--stream") == whole["text"] + "\n"
    events = [
        json.loads(line) for line in ask(capsys, *arguments, "--drafts", "--json").splitlines()
    ]
    kinds = [event["event"] for event in events]
    assert kinds.count("draft") == sum(whole["steps"])
    assert kinds.count("block") == len(whole["steps"])
    assert kinds[-1] == "finished"
    assert events[-1]["token_ids"] == whole["token_ids"]
    assert "".join(e["text"] for e in events if e["event"] == "block") == whole["text"]


def test_drafts_are_a_line_each_off_a_terminal(demo, capsys) -> None:
    data = json.loads(ask(capsys, "generate", demo.bundle, "17+25=", "--json"))
    lines = ask(capsys, "generate", demo.bundle, "17+25=", "--drafts").splitlines()
    assert len(lines) == sum(data["steps"]) + 1
    assert lines[0].startswith("block 0 step 1: ")
    assert lines[-1] == f"block 0 final after {data['steps'][0]} steps: {data['text']!r}"


def test_drafts_are_drawn_in_place_on_a_terminal(demo, capsys) -> None:
    arguments = ["generate", demo.bundle, "count 7 to 31", "--max-new-tokens", 96]
    text = json.loads(ask(capsys, *arguments, "--json"))["text"]
    drawn = on_a_terminal(*arguments, "--drafts")
    assert drawn.count("block 0, step 1") >= 1
    erase_line, show_cursor = "\x1b[2K", "\x1b[?25h"
    assert drawn.rpartition(erase_line)[2].strip() == text
    assert show_cursor in drawn


def test_several_answers_have_seeds_of_their_own(demo, capsys) -> None:
    answers = json.loads(
        ask(capsys, "generate", demo.bundle, "shuffle abcdef", "--n", 3, "--seed", 5, "--json")
    )
    assert [answer["seed"] for answer in answers] == [5, 6, 7]
    alone = json.loads(
        ask(capsys, "generate", demo.bundle, "shuffle abcdef", "--seed", 6, "--json")
    )
    assert answers[1]["token_ids"] == alone["token_ids"]


def test_settings_reach_the_sampler(undertrained, capsys) -> None:
    base = ["generate", undertrained.bundle, "sort 3142", "--json"]
    fixed = json.loads(ask(capsys, *base, "--steps", 5, "--all-steps", "--max-new-tokens", 40))
    assert set(fixed["steps"]) == {5}
    hot = json.loads(ask(capsys, *base, "--t-min", 2, "--t-max", 3, "--entropy-bound", 50))
    assert hot["steps"] != fixed["steps"] or hot["token_ids"] != fixed["token_ids"]


def test_token_ids_in_and_no_tokenizer(tiny, capsys) -> None:
    arguments = ["generate", tiny.bundle, "--prompt-ids", "3,4,5", "--max-new-tokens", 4]
    data = json.loads(ask(capsys, *arguments, "--steps", 2, "--json"))
    assert data["prompt_token_ids"] == [3, 4, 5]
    assert data["text"] is None
    assert ask(capsys, *arguments, "--steps", 2).strip() == ",".join(map(str, data["token_ids"]))


def test_a_short_context_shortens_an_answer_without_a_budget(demo, capsys) -> None:
    arguments = ["generate", demo.bundle, "9" * 4000, "--raw", "--steps", 1, "--json"]
    data = json.loads(ask(capsys, *arguments))
    room = 4096 - len(data["prompt_token_ids"])
    assert len(data["steps"]) <= room // 32 < 8
    arguments += ["--max-new-tokens", 256]
    assert "exceed the context of 4096" in refused(capsys, *arguments)


def test_raw_prompts_have_no_template(demo, capsys) -> None:
    data = json.loads(ask(capsys, "generate", demo.bundle, "abc", "--raw", "--json"))
    assert data["prompt_token_ids"] == demo.tokenizer.encode("abc")


def test_a_prompt_from_stdin(demo, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("17+25="))
    data = json.loads(ask(capsys, "generate", demo.bundle, "-", "--json"))
    prompt = demo.tokenizer.encode_chat([{"role": "user", "content": "17+25="}])
    assert data["prompt_token_ids"] == prompt
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n "))
    assert "the prompt is empty" in refused(capsys, "generate", demo.bundle, "-")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt-ids", "3,112"], "112"),
        (["x", "--max-new-tokens", 5000], "--max-new-tokens is 5000"),
        (["x", "--t-min", 3], "below --t-min"),
        (["a" * 5000], "exceed the context of 4096"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_this_model_cannot_do(demo, capsys, arguments: list, named: str) -> None:
    assert named in refused(capsys, "generate", demo.bundle, *arguments)


def test_a_bundle_that_is_damaged(demo, capsys, tmp_path: Path) -> None:
    copy = shutil.copytree(demo.bundle, tmp_path / "copy")
    graph = copy / "head.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    assert "head.onnx" in refused(capsys, "generate", copy, "x")
    assert "no bundle" in refused(capsys, "generate", tmp_path / "nothing", "x")


def test_the_device_that_was_asked_for_is_used_or_refused(demo, capsys) -> None:
    ask(capsys, "generate", demo.bundle, "17+25=", "--device", "cpu", "--json")
    for command in (["generate", demo.bundle, "x"], ["bench", demo.bundle]):
        assert "built for the CPU" in refused(capsys, *command, "--device", "cuda")


def test_bench_reports_what_is_promised(demo, capsys) -> None:
    arguments = ["bench", demo.bundle, "--steps", 3, "--rounds", 2, "--threads", 1]
    data = json.loads(ask(capsys, *arguments, "--batch", 2, "--json"))
    side = data["canvasrt"]
    assert side["steps_per_block"] == 3
    assert side["rounds"] == 2
    assert data["settings"]["device"] == "cpu"
    for name in ("forward_ms", "tokens_per_second", "first_tokens_ms"):
        assert 0 < side[name]["min"] <= side[name]["median"] <= side[name]["max"]
    shown = ask(capsys, *arguments)
    for word in ("forward pass, ms", "steps per block", "tokens per second", "first tokens, ms"):
        assert word in shown


def test_bench_against_the_reference(demo, capsys) -> None:
    arguments = ["bench", demo.bundle, "--against", "transformers", "--checkpoint", "demo"]
    data = json.loads(
        ask(capsys, *arguments, "--steps", 2, "--rounds", 1, "--threads", 1, "--json")
    )
    assert data["transformers"]["steps_per_block"] == data["canvasrt"]["steps_per_block"] == 2
    assert data["ratio"]["median"] > 0


def test_bench_refuses_prompts_that_do_not_fit(demo, capsys) -> None:
    assert "exceed the context" in refused(capsys, "bench", demo.bundle, "--prompt-tokens", 5000)
