"""Calibration prompts: JSONL files that are checked completely before anything runs, then read line
by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.bundle import Bundle
from canvasrt.checkpoints import locate as checkpoints
from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.errors import CanvasError
from canvasrt.recipes.recipe import CalibrationSettings
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

PROMPT_KINDS = ("prompt", "messages", "prompt_ids")
_HINT = (
    'a line is {"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}]}'
    ' or {"prompt_ids": [...]}'
)


def default_prompts(graphs: Bundle) -> Path:
    """Return the prompts that come with canvasrt: the demo's own for the bundled
    checkpoints, general ones otherwise."""
    import canvasrt.recipes

    made_from = graphs.manifest.made_from.get("files")
    bundled = map(checkpoints.demo_checkpoint, checkpoints.BUNDLED)
    if made_from and made_from in map(checkpoints.fingerprint, bundled):
        return checkpoints.DEMO_FOLDER / "calibration.jsonl"
    return Path(canvasrt.recipes.__path__[0]) / "prompts.jsonl"


@dataclass(frozen=True)
class CalibrationPrompts:
    """The prompts of a file, as requests."""

    file: Path
    tokenizer: Tokenizer | None
    config: ModelConfig
    sampler: SamplerDefaults
    settings: CalibrationSettings
    max_context: int

    def check(self) -> int:
        """Return the number of requests. CanvasError names the file and the unusable line."""
        count = 0
        for number, request in self._requests():
            self._validate(number, request)
            count += 1
        if not count:
            raise CanvasError(f"{self.file} contains no prompts", _HINT)
        # Lines beyond the recipe's number do not run, but a broken file is still an error.
        for number, line in self._lines():
            self._parse(number, line)
        return count

    def sha256(self) -> str:
        """Return the file's SHA-256."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order, up to the recipe's number, with one line in memory at a time."""
        return (request for _, request in self._requests())

    def _requests(self) -> Iterator[tuple[int, Request]]:
        """Yield the requests and the numbers of their lines."""
        for index, (number, line) in enumerate(self._lines()):
            if index == self.settings.prompts:
                return
            yield number, Request(self._ids(number, line), self._params(index))

    def _validate(self, number: int, request: Request) -> None:
        try:
            request.validate(self.config, self.max_context)
        except CanvasError as error:
            hint = error.hint.replace(
                "ask for fewer new tokens",
                "give a smaller calibration.max_new_tokens in a recipe of your own",
            )
            raise self._wrong(number, error.message, hint) from error

    def _params(self, index: int) -> SamplingParams:
        """Return a prompt's parameters. Prompts that take all steps are spread evenly over the
        file, starting with the first."""
        share = self.settings.all_steps
        taken = [-(-each * share // 1) for each in (index, index + 1)]
        return SamplingParams.from_defaults(
            self.sampler,
            self.config,
            seed=self.settings.seed + index,
            max_new_tokens=self.settings.max_new_tokens,
            early_stop=taken[0] == taken[1],
        )

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield non-empty lines, numbered from 1."""
        try:
            with self.file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, line
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise CanvasError(f"cannot read {self.file}: {why}", _HINT) from error

    def _ids(self, number: int, line: str) -> list[int]:
        kind, value = self._parse(number, line)
        if kind == "prompt_ids":
            return value
        ids_hint = 'give token ids: {"prompt_ids": [...]}'
        if self.tokenizer is None:
            raise self._wrong(number, "the graphs have no tokenizer", ids_hint)
        chat = value if kind == "messages" else [{"role": "user", "content": value}]
        try:
            return self.tokenizer.encode_chat(chat)
        except CanvasError as error:
            if not self.tokenizer.has_template:
                raise self._wrong(number, error.message, ids_hint) from error
            raise self._wrong(number, error.message, error.hint) from error

    def _parse(self, number: int, line: str) -> tuple[str, Any]:
        """Return the kind of a line and its value. Other keys are ignored."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._wrong(
                number, f"it is not JSON ({error.msg.removesuffix(' at')}, column {error.colno})"
            ) from error
        kinds = [kind for kind in PROMPT_KINDS if isinstance(data, dict) and kind in data]
        if len(kinds) != 1:
            raise self._wrong(number, f"it needs exactly one of {', '.join(PROMPT_KINDS)}")
        (kind,) = kinds
        value = data[kind]
        if not _FITS[kind](value):
            raise self._wrong(number, f"its {kind} is {_short(value)}")
        return kind, value

    def _wrong(self, number: int, message: str, hint: str = _HINT) -> CanvasError:
        return CanvasError(f"{self.file}, line {number}: {message}", hint)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


_FITS = {
    "prompt": lambda value: isinstance(value, str) and bool(value.strip()),
    "messages": _is_chat,
    "prompt_ids": _are_ids,
}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 60 else f"{text[:60]}…"
