"""A batch's input file, and its journal, which may be cut off at any byte. No model is needed."""

from __future__ import annotations

import errno
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from canvasrt.containers.batch.journal import Journal, Outputs
from canvasrt.containers.batch.lines import URLS, Line, read_lines
from canvasrt.containers.batch.run import Reply, run_batch, steady
from canvasrt.containers.openai.app import ENDPOINTS
from canvasrt.errors import CanvasError
from tests.helpers.batches import chat, write


class Echo:
    """Answers every request with the request's body."""

    def __init__(self) -> None:
        self.asked: list[Line] = []

    async def ask(self, line: Line) -> Reply:
        self.asked.append(line)
        body = json.loads(line.body)
        return Reply(400 if "refuse" in body else 200, {"id": f"chatcmpl-{'x' * 20}", "got": body})


def run(file: Path, out: Path, seed: int = 0, echo: Echo | None = None, at_once: int = 1) -> Any:
    opened: Any = nullcontext(echo or Echo())
    return run_batch(file, out, seed, "echo", opened, at_once)


def test_urls_are_those_of_endpoints_that_take_a_seed() -> None:
    assert {each.path for each in ENDPOINTS if "seed" in each.body.model_fields} >= set(URLS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not an object"),
        ({"custom_id": None}, "line 2 has no custom_id"),
        ({"custom_id": "one"}, "line 2 has the same custom_id as line 1: 'one'"),
        ({"method": "GET"}, "line 2: method is 'GET'"),
        ({"url": "/v1/embeddings"}, "line 2: url is '/v1/embeddings'"),
        ({"url": ["/v1/completions"]}, "line 2: url is ['/v1/completions']"),
        ({"body": "text"}, "line 2: body is not an object"),
        ({"body": {"stream": True}}, "line 2: body.stream is set"),
        ('{"custom_id": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named_before_any_work(tmp_path: Path, line: Any, says: str) -> None:
    text = line if isinstance(line, str) else json.dumps(chat("two") | line)
    file = write(tmp_path, chat("one"), text, chat("three"))
    echo = Echo()
    with pytest.raises(CanvasError, match=re.escape(says)):
        run(file, tmp_path / "out.jsonl", echo=echo)
    assert not echo.asked
    assert list(tmp_path.iterdir()) == [file]


def test_a_seed_follows_from_the_custom_id(tmp_path: Path) -> None:
    def seeds(*lines: dict[str, Any], seed: int = 0) -> dict[str, int]:
        found = read_lines(write(tmp_path, *lines), seed).lines
        return {each.custom_id: json.loads(each.body).get("seed") for each in found}

    one, two, own = chat("one"), chat("two"), chat("own", seed=7)
    first = seeds(one, two, own, chat("read", "/v1/decisions"))
    assert first["one"] != first["two"]
    assert (first["own"], first["read"]) == (7, None)
    assert seeds(own, two, one) == {each: first[each] for each in ("own", "two", "one")}
    assert seeds(one, seed=1)["one"] != first["one"]
    assert seeds(chat("one", seed=-1)) == {"one": first["one"]}  # -1 is no seed


def test_prompts_with_one_beginning_run_together(tmp_path: Path) -> None:
    texts = ("b 1", "a 1", "b 2", "a 2")
    echo = Echo()
    file = write(tmp_path, *(chat(text, content=text) for text in texts))
    run(file, tmp_path / "out.jsonl", echo=echo)
    assert [each.custom_id for each in echo.asked] == sorted(texts)
    kept = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in kept] == list(texts)


def test_a_journal_cut_anywhere_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, chat("one"), chat("two", refuse=1), "", chat("three ü"), chat("four"))
    outputs = Outputs.of(tmp_path / "out.jsonl")
    whole = tmp_path / "whole"
    finish = Journal.finish

    def keep(self: Journal) -> int:
        whole.write_bytes(outputs.journal.read_bytes())
        assert all(map(json.loads, whole.read_bytes().splitlines()))  # for another start
        return finish(self)

    monkeypatch.setattr(Journal, "finish", keep)
    assert run(file, outputs.answers)[:2] == (3, 1)
    expected = [each.read_bytes() for each in outputs[:2]]
    assert not outputs.journal.exists()
    data = whole.read_bytes()
    for length in range(0, len(data) + 1, 9):
        outputs.journal.write_bytes(data[:length])
        if not length:
            outputs.answers.unlink()
            outputs.errors.unlink()
        echo = Echo()
        run(file, outputs.answers, echo=echo, at_once=3)
        assert [each.read_bytes() for each in outputs[:2]] == expected
        assert len(echo.asked) == 4 - max(0, data[:length].count(b"\n") - 1)


def test_other_work_is_refused(tmp_path: Path) -> None:
    file, out = write(tmp_path, chat("one")), tmp_path / "out.jsonl"
    outputs = Outputs.of(out)
    identity = {"input": read_lines(file, 0).digest, "seed": 0, "model": "echo"}
    with Journal(outputs, identity) as journal:
        with pytest.raises(CanvasError, match=r"another batch is writing .*out\.jsonl"):
            run(file, out)
        journal.add(read_lines(file, 0).lines[0], {}, failed=False)
    with pytest.raises(CanvasError, match="begun with another seed"):
        run(file, out, seed=1)
    write(tmp_path, chat("two"))
    with pytest.raises(CanvasError, match="begun with another input"):
        run(file, out)
    outputs.journal.unlink()
    run(file, out)
    with pytest.raises(CanvasError, match="exists"):
        run(file, out)


def test_a_batch_without_any_answer_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, chat("one"))
    monkeypatch.setattr(Echo, "ask", None)  # every request fails
    with pytest.raises(TypeError):
        run(file, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "journal",
    [
        b"a download, and no newline",
        b'{"custom_id": "one", "url": "/v1/completions"}',
        b'{"custom_id": "one"}\n{"custom_id": "two"}',
        *(
            b"IDENTITY\n%s\n" % each
            for each in (b"nothing", b"{}", b'{"line": [1]}', b'{"line": 1}', b"[" * 100_000)
        ),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_another_file_in_the_journals_place_stays(
    tmp_path: Path, journal: bytes, linked: bool
) -> None:
    file, outputs = write(tmp_path, chat("one")), Outputs.of(tmp_path / "out.jsonl")
    identity = {"input": read_lines(file, 0).digest, "seed": 0, "model": "echo"}
    data = journal.replace(b"IDENTITY", json.dumps(identity).encode())
    there = tmp_path / "there" if linked else outputs.journal
    there.write_bytes(data)
    if linked:
        outputs.journal.symlink_to(there)
    with pytest.raises(CanvasError, match="is damaged, or is not the journal"):
        run(file, outputs.answers)
    assert there.read_bytes() == data


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    file, other = write(tmp_path, chat("one")), tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".out.jsonl.tmp").symlink_to(other)
    run(file, tmp_path / "out.jsonl")
    assert other.read_text() == "mine"


def test_a_journal_that_another_process_finishes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finishes between this one's search for the journal and its lock. Its output is kept."""
    file, outputs = write(tmp_path, chat("one")), Outputs.of(tmp_path / "out.jsonl")
    lock = Journal._lock

    def late(self: Journal) -> None:
        monkeypatch.setattr(Journal, "_lock", lock)
        outputs.journal.unlink()
        outputs.answers.write_text("the other's")
        lock(self)

    monkeypatch.setattr(Journal, "_lock", late)
    with pytest.raises(CanvasError, match="another batch is writing"):
        run(file, outputs.answers)
    assert outputs.answers.read_text() == "the other's"
    with pytest.raises(CanvasError, match="exists"):
        run(file, outputs.answers)
    assert not outputs.journal.exists()


def test_a_disk_without_locks_takes_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert run(write(tmp_path, chat("one")), tmp_path / "out.jsonl").answers == 1


def test_an_output_needs_a_name() -> None:
    with pytest.raises(CanvasError, match="is a folder"):
        Outputs.of(Path("."))


def test_only_what_another_run_would_not_repeat_is_replaced() -> None:
    key, id = "k" * 24, "call_" + "a" * 24
    reply = {
        "id": "resp_" + "b" * 32,
        "created_at": 1.5,
        "metadata": {"id": id, "created": 3},
        "output": [{"call_id": id, "name": "created"}, {"id": id, "text": id}],
        "usage": {"input_tokens_details": {"cached_tokens": 9}, "input_tokens": 12},
    }
    assert steady(reply, key) == {
        **reply,
        "id": f"resp_{key}",
        "created_at": 0,
        "output": [
            {"call_id": f"call_{key}1", "name": "created"},
            {"id": f"call_{key}1", "text": id},
        ],
        "usage": {"input_tokens_details": {"cached_tokens": 0}, "input_tokens": 12},
    }
