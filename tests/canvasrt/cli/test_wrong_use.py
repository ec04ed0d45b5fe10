"""Wrong use of every command: exit code 2, one `error:` line, one `hint:` line, and no other output."""

from __future__ import annotations

import ast
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from canvasrt.cli.app import COMMANDS, parsed_command, run
from canvasrt.errors import UsageError
from canvasrt.runtime.sampling_params import PARAMETERS
from tests.helpers.wrong_use import ELSEWHERE, FILES, VARIABLES, WRONG

ROOT = Path(__file__).parents[3]


def refused(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command line; check that it is refused with this message."""
    before = sorted(Path().rglob("*"))
    assert run(shlex.split(line)) == 2, line
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [each.partition(":")[0] for each in lines] == ["error", "hint"], (line, captured.err)
    assert says in lines[0], line
    assert len(lines[1]) > len("hint: "), line
    assert captured.out == "", line
    assert sorted(Path().rglob("*")) == before, line


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_the_table_has_every_command() -> None:
    assert {line.split()[0] for line in WRONG} >= set(COMMANDS)


def raised() -> dict[tuple[str, int], str]:
    """Return the source of every `UsageError(…)` by file and first line."""
    found = {}
    for top in ("canvasrt", "export", "build", "runtime", "containers"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UsageError":
                    place = (str(file.relative_to(ROOT)), node.lineno)
                    found[place] = " ".join(ast.unparse(node).split())
    return found


def test_wrong_use_exits_with_2_and_every_usage_error_has_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new `UsageError` needs a row in `tests/helpers/wrong_use.py`."""
    reached: set[tuple[str, int]] = set()
    before = UsageError.__init__

    def remember(self: UsageError, *args: Any, **names: Any) -> None:
        frame = sys._getframe(1)
        if (file := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
            reached.add((str(file.relative_to(ROOT)), frame.f_lineno))
        before(self, *args, **names)

    monkeypatch.setattr(UsageError, "__init__", remember)
    monkeypatch.chdir(tmp_path)
    for line, says in WRONG.items():
        refused(line, says, capsys)
    for line, variables in VARIABLES.items():
        for name, (value, says) in variables.items():
            monkeypatch.setenv(name, value)
            refused(line, says, capsys)
            monkeypatch.delenv(name)
    for line, (name, text, says) in FILES.items():
        write(tmp_path / name, text)
        refused(line, says, capsys)
    sources = raised()
    assert len(sources) > 50
    for (file, words), test in ELSEWHERE.items():
        said = words.rpartition("} ")[2]
        assert said in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not say {said!r}"
        places = [each for each, text in sources.items() if each[0] == file and words in text]
        assert len(places) == 1, f"{len(places)} errors of {file} say {words!r}"
        reached |= set(places)
    assert {place: source for place, source in sources.items() if place not in reached} == {}


def numbers() -> list[tuple[str, str, list[str]]]:
    """Return every option that takes a number: its command, its name, and values that it refuses."""
    found = []
    for command in COMMANDS:
        for each in parsed_command(command).params:
            if each.type_descriptor.annotation not in (int, float):
                continue
            ends = [each.min - 1] if each.min is not None else []
            ends += [each.max + 1] if each.max is not None else []
            option = next(name for name in each.opts if name.startswith("--"))
            found.append((command, option, ["x", *map(str, ends)]))
    return found


def test_every_number_is_checked() -> None:
    found = numbers()
    assert len(found) > 50
    sampling = {each.option.partition("/")[0] for each in PARAMETERS}
    commands = {name: parsed_command(name) for name in COMMANDS}
    for command, option, values in found:
        rows = [line for line in WRONG if line.startswith(f"{command} ") and option in line]
        assert len(values) > 1 or option in sampling or rows, f"{command} {option} has no limits"
        for value in values:
            with pytest.raises(Exception) as refused:  # noqa: PT011 - Typer has no public type
                commands[command].make_context(command, [option, value])
            error: Any = refused.value
            assert error.exit_code == 2, (command, option, value)
            assert option in error.format_message(), (command, option, value)
