"""The journal of a batch: a file next to the output, from which an interrupted batch resumes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from canvasrt.containers.batch.lines import Line
from canvasrt.errors import CanvasError
from canvasrt.staging import sync


class Outputs(NamedTuple):
    """The files of one batch, all in one folder."""

    answers: Path
    errors: Path
    journal: Path

    @classmethod
    def of(cls, answers: Path) -> Outputs:
        """Return the files beside `answers`: answers.jsonl, answers.errors.jsonl, answers.jsonl.partial."""
        errors = answers.with_name(f"{answers.stem}.errors{answers.suffix}")
        return cls(answers, errors, answers.with_name(f"{answers.name}.partial"))


class Journal:
    """A first line that identifies the batch, then one JSON line per finished request, written immediately.

    As a context manager, it locks the output against other batches.
    """

    def __init__(self, outputs: Outputs, identity: Mapping[str, Any]) -> None:
        """Open or create the journal. `identity`: the values that all answers of the output have in common.

        Raises CanvasError if the output is complete, locked, or was begun with another identity.
        """
        self._outputs = outputs
        path = outputs.journal
        if not path.exists():
            for each in (outputs.answers, outputs.errors):
                if each.exists():
                    raise CanvasError(f"{each} exists", "name another output, or remove it first")
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            self._places = self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __contains__(self, line: Line) -> bool:
        return line.number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, line: Line, entry: Mapping[str, Any], failed: bool) -> None:
        """Record a line of the output; with `failed`, of the error file."""
        self._places[line.number] = self._file.tell()
        self._write({"line": line.number, "failed": failed, "entry": entry})

    def finish(self) -> int:
        """Write the output and the error file in the input's order, and remove the journal. Return the number of errors.

        Without errors there is no error file.
        """
        staged = {each: each.with_name(f".{each.name}.tmp") for each in self._outputs[:2]}
        counts = dict.fromkeys(staged, 0)
        with staged[self._outputs.answers].open("wb") as answers:
            with staged[self._outputs.errors].open("wb") as errors:
                for _, place in sorted(self._places.items()):
                    self._file.seek(place)
                    kept = json.loads(self._file.readline())
                    file = errors if kept["failed"] else answers
                    counts[self._outputs.errors] += kept["failed"]
                    file.write(_encoded(kept["entry"]))
        for path, made in staged.items():
            if path == self._outputs.errors and not counts[path]:
                made.unlink()
                path.unlink(missing_ok=True)
                continue
            sync(made)
            made.rename(path)
        sync(self._outputs.answers.parent)
        self._outputs.journal.unlink()
        return counts[self._outputs.errors]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CanvasError(
                f"another batch writes {self._outputs.answers}",
                "wait for it, or name another output",
            ) from None

    def _read(self, identity: Mapping[str, Any]) -> dict[int, int]:
        """Return the file offsets of finished lines by line number. A truncated last line is dropped."""
        self._file.seek(0)
        places: dict[int, int] = {}
        place, first = 0, None
        for text in self._file:
            if not text.endswith(b"\n"):
                break
            data = self._parsed(text)
            if first is None:
                first = data
            else:
                places[data["line"]] = place
            place += len(text)
        os.truncate(self._outputs.journal, place)
        self._file.seek(0, os.SEEK_END)
        if first is None:
            self._write(identity)
        elif first != identity:
            names = [name for name in identity if first.get(name) != identity[name]]
            raise CanvasError(
                f"{self._outputs.journal} was begun with another {', '.join(names)}",
                "repeat the command that began it, or remove the file to begin anew",
            )
        return places

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise CanvasError(
                f"{self._outputs.journal} is damaged", "remove the file to begin anew"
            )
        return data

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(_encoded(data))
        self._file.flush()


def _encoded(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
