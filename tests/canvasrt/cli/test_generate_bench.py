"""`canvasrt generate` and `canvasrt bench`, run in a separate process."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from tests.canvasrt.cli.conftest import Ask, Terminal, fails
from tests.conftest import Command
from tests.helpers.reference import Pair


def test_json_holds_what_is_promised(demo: Pair, ask: Ask) -> None:
    data = json.loads(ask("generate", demo.bundle, "17+25=", "--seed", 3, "--json"))
    chat = [{"role": "user", "content": "17+25="}]
    assert data["prompt_token_ids"] == demo.tokenizer.encode_chat(chat)
    assert data["text"] == demo.tokenizer.decode(data["token_ids"])
    assert (data["finish_reason"], data["seed"], len(data["steps"])) == ("stop", 3, 1)
    assert ask("generate", demo.bundle, "17+25=", "--seed", 3) == data["text"] + "\n"


def test_streams_end_in_the_same_answer(demo: Pair, ask: Ask) -> None:
    arguments = ["generate", demo.bundle, "count 7 to 31", "--max-new-tokens", 96]
    whole = json.loads(ask(*arguments, "--json"))
    assert ask(*arguments, "--stream") == whole["text"] + "\n"
    events = [json.loads(line) for line in ask(*arguments, "--drafts", "--json").splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.count("draft") == sum(whole["steps"])
    assert kinds.count("block") == len(whole["steps"])
    assert kinds[-1] == "finished"
    assert events[-1]["token_ids"] == whole["token_ids"]
    assert "".join(e["text"] for e in events if e["event"] == "block") == whole["text"]


def test_drafts_are_a_line_each_off_a_terminal_and_drawn_in_place_on_one(
    demo: Pair, ask: Ask
) -> None:
    arguments = ("generate", demo.bundle, "count 7 to 31", "--max-new-tokens", 96)
    data = json.loads(ask(*arguments, "--json"))
    blocks = len(data["steps"])
    assert blocks > 1
    lines = ask(*arguments, "--drafts").splitlines()
    assert len(lines) == sum(data["steps"]) + blocks
    assert lines[0].startswith("block 0 step 1: ")
    assert lines[-1].startswith(f"block {blocks - 1} final after {data['steps'][-1]} steps: ")
    assert lines[-1].endswith(data["text"][-4:] + "'")
    with Terminal(*arguments, "--drafts") as terminal:
        drawn, code = terminal.end()
    assert (code, "block 0, step 1" in drawn) == (0, True)
    erase_line, show_cursor = "\x1b[2K", "\x1b[?25h"
    assert drawn.rpartition(erase_line)[2].strip() == data["text"]
    assert show_cursor in drawn


def test_several_answers_have_seeds_of_their_own(demo: Pair, ask: Ask) -> None:
    arguments = ("generate", demo.bundle, "shuffle abcdef", "--json")
    answers = json.loads(ask(*arguments, "--n", 3, "--seed", 5))
    assert [answer["seed"] for answer in answers] == [5, 6, 7]
    alone = json.loads(ask(*arguments, "--seed", 6))
    assert answers[1]["token_ids"] == alone["token_ids"]


def test_settings_reach_the_sampler(undertrained: Pair, ask: Ask) -> None:
    base = ["generate", undertrained.bundle, "sort 3142", "--json"]
    fixed = json.loads(ask(*base, "--steps", 5, "--all-steps", "--max-new-tokens", 40))
    assert set(fixed["steps"]) == {5}
    hot = json.loads(ask(*base, "--t-min", 2, "--t-max", 3, "--entropy-bound", 50))
    assert hot["steps"] != fixed["steps"] or hot["token_ids"] != fixed["token_ids"]


def test_token_ids_in_and_no_tokenizer(tiny: Pair, ask: Ask) -> None:
    arguments = ["generate", tiny.bundle, "--prompt-ids", "3,4,5", "--max-new-tokens", 4]
    data = json.loads(ask(*arguments, "--steps", 2, "--json"))
    assert (data["prompt_token_ids"], data["text"]) == ([3, 4, 5], None)
    assert ask(*arguments, "--steps", 2).strip() == ",".join(map(str, data["token_ids"]))


def test_a_short_context_shortens_an_answer_without_a_budget(
    demo: Pair, ask: Ask, here: Command
) -> None:
    arguments = ["generate", demo.bundle, "9" * 4000, "--raw", "--steps", 1, "--json"]
    data = json.loads(ask(*arguments))
    room = 4096 - len(data["prompt_token_ids"])
    assert len(data["steps"]) <= room // 32 < 8
    fails(here(*arguments, "--max-new-tokens", 256), "exceed the context of 4096")


def test_raw_prompts_and_prompts_from_stdin(
    demo: Pair, ask: Ask, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(ask("generate", demo.bundle, "abc", "--raw", "--json"))
    assert data["prompt_token_ids"] == demo.tokenizer.encode("abc")
    monkeypatch.setattr("sys.stdin", io.StringIO("17+25="))
    data = json.loads(ask("generate", demo.bundle, "-", "--json"))
    prompt = demo.tokenizer.encode_chat([{"role": "user", "content": "17+25="}])
    assert data["prompt_token_ids"] == prompt
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n "))
    fails(here("generate", demo.bundle, "-"), "the prompt is empty")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("generate {} --prompt-ids 3,112", "112"),
        ("generate {} x --max-new-tokens 5000", "--max-new-tokens is 5000"),
        ("generate {} x --t-min 3", "below --t-min"),
        (f"generate {{}} {'a' * 5000}", "exceed the context of 4096"),
        ("generate {} x --device cuda", "built for the CPU"),
        ("bench {} --device cuda", "built for the CPU"),
        ("bench {} --prompt-tokens 5000", "exceed the context"),
    ],
    ids=lambda value: value[:40],
)
def test_what_this_model_cannot_do(demo: Pair, here: Command, arguments: str, named: str) -> None:
    fails(here(*(each.format(demo.bundle) for each in arguments.split())), named)


def test_a_bundle_that_is_damaged(demo: Pair, here: Command, tmp_path: Path) -> None:
    copy = shutil.copytree(demo.bundle, tmp_path / "copy")
    graph = copy / "head.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    fails(here("generate", copy, "x"), "head.onnx")
    fails(here("generate", tmp_path / "nothing", "x"), "no bundle")


def test_bench_reports_what_is_promised(demo: Pair, ask: Ask) -> None:
    arguments = ["bench", demo.bundle, "--steps", 3, "--rounds", 2, "--threads", 1]
    data = json.loads(ask(*arguments, "--batch", 2, "--device", "cpu", "--json"))
    side = data["canvasrt"]
    assert (side["steps_per_block"], side["rounds"]) == (3, 2)
    assert data["settings"]["device"] == "cpu"
    for name in ("forward_ms", "tokens_per_second", "first_tokens_ms"):
        assert 0 < side[name]["min"] <= side[name]["median"] <= side[name]["max"]
    shown = ask(*arguments)
    for word in ("forward pass, ms", "steps per block", "tokens per second", "first tokens, ms"):
        assert word in shown


def test_bench_against_the_reference(demo: Pair, ask: Ask) -> None:
    arguments = ["bench", demo.bundle, "--against", "transformers", "--checkpoint", "demo"]
    data = json.loads(ask(*arguments, "--steps", 2, "--rounds", 1, "--threads", 1, "--json"))
    assert data["transformers"]["steps_per_block"] == data["canvasrt"]["steps_per_block"] == 2
    assert data["ratio"]["median"] > 0
