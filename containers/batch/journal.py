"""The journal of a batch: a file next to the output, from which an interrupted batch resumes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from canvasrt.containers.batch.lines import Line
from canvasrt.errors import CanvasError
from canvasrt.staging import NO_LOCKS, sync

_MOST_IDENTITY = 4096  # maximum size of the first line, in bytes


class Outputs(NamedTuple):
    """The files of one batch, all in one folder."""

    answers: Path
    errors: Path
    journal: Path

    @classmethod
    def of(cls, answers: Path) -> Outputs:
        """Return the files for an output: for answers.jsonl, also answers.errors.jsonl and answers.jsonl.partial."""
        if not answers.name:
            raise CanvasError(f"{answers} is a folder", "name a file")
        errors = answers.with_name(f"{answers.stem}.errors{answers.suffix}")
        return cls(answers, errors, answers.with_name(f"{answers.name}.partial"))


class Journal:
    """A first line that identifies the batch, then one JSON line per request, written when the request finishes.

    It locks the output against other batches until its `with` block ends.
    """

    def __init__(self, outputs: Outputs, identity: Mapping[str, Any]) -> None:
        """Open or create the journal. `identity`: values that must be the same when the batch resumes.

        Raises CanvasError if the output is complete or locked, or was begun with a different identity.
        """
        self._outputs = outputs
        self._file = self._open()
        try:
            self._lock()
            self._places = self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        # A journal without answers has nothing to resume, and would only block other batches.
        if self._is_alone and not self._places:
            self._outputs.journal.unlink(missing_ok=True)
        self._file.close()

    def __contains__(self, line: Line) -> bool:
        return line.number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, line: Line, entry: Mapping[str, Any], failed: bool) -> None:
        """Record a request's entry for the output file, or for the error file if `failed`."""
        self._places[line.number] = self._file.tell()
        self._write({"line": line.number, "failed": failed, "entry": entry})

    def finish(self) -> int:
        """Write the output and the error file in the input's order, and remove the journal. Return the error count.

        Without errors there is no error file.
        """
        staged = {each: each.with_name(f".{each.name}.tmp") for each in self._outputs[:2]}
        counts = dict.fromkeys(staged, 0)
        for each in staged.values():
            each.unlink(missing_ok=True)
        with staged[self._outputs.answers].open("xb") as answers:
            with staged[self._outputs.errors].open("xb") as errors:
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
        self._outputs.journal.unlink(missing_ok=True)
        return counts[self._outputs.errors]

    def _open(self) -> BinaryIO:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o666)

        try:
            return open(self._outputs.journal, "a+b", opener=opener)
        except OSError as error:
            if error.errno in (errno.ELOOP, None):  # its path is a link, or a pipe
                raise self._foreign() from None
            raise

    def _lock(self) -> None:
        self._is_alone = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self._is_alone = False  # another batch may be writing the journal
        if not os.fstat(self._file.fileno()).st_nlink:  # another batch has removed the journal
            raise self._taken()

    def _read(self, identity: Mapping[str, Any]) -> dict[int, int]:
        """Return the offset of each finished entry, keyed by line number. Drops a truncated last entry.

        Writes nothing until the first line has shown that this is the batch's journal.
        """
        own = _encoded(identity)
        self._file.seek(0)
        first = self._file.readline(_MOST_IDENTITY)
        if not first:
            self._check_new()
        if first.endswith(b"\n"):
            self._check_identity(first, identity)
        elif not own.startswith(first):
            raise self._foreign()
        place = len(first) if first.endswith(b"\n") else 0
        places: dict[int, int] = {}
        for text in self._file:
            if not text.endswith(b"\n"):
                break
            match self._parsed(text):
                case {"line": int(line), "failed": bool(), "entry": dict()}:
                    places[line] = place
                case _:
                    raise self._foreign()
            place += len(text)
        os.ftruncate(self._file.fileno(), place)
        self._file.seek(0, os.SEEK_END)
        if not place:
            self._write(identity)
        return places

    def _check_new(self) -> None:
        for each in self._outputs[:2]:
            if each.exists():
                self._outputs.journal.unlink()
                raise CanvasError(f"{each} exists", "name another output, or remove it first")

    def _check_identity(self, first: bytes, identity: Mapping[str, Any]) -> None:
        found = self._parsed(first)
        if not isinstance(found, dict) or found.keys() != identity.keys():
            raise self._foreign()
        if names := [name for name in identity if found[name] != identity[name]]:
            raise CanvasError(
                f"{self._outputs.journal} was begun with another {', '.join(names)}",
                "repeat the command that began it, or remove the file to start over",
            )

    def _parsed(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._foreign() from None

    def _foreign(self) -> CanvasError:
        return CanvasError(
            f"{self._outputs.journal} is damaged, or is not the journal of a batch",
            "name another output, or remove the file to start over",
        )

    def _taken(self) -> CanvasError:
        return CanvasError(
            f"another batch is writing {self._outputs.answers}",
            "wait for it, or name another output",
        )

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(_encoded(data))
        self._file.flush()


def _encoded(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
