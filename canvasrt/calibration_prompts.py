"""Calibration prompts: JSONL files. A file is checked completely before any prompt runs, and then read line by line."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvasrt.cache import QUANTIZED_BY, versions
from canvasrt.checkpoints import locate as checkpoints
from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.defaults import MAX_CONTEXT, PREFILL_CHUNK
from canvasrt.errors import CanvasError, UsageError
from canvasrt.recipes.recipe import CalibrationSettings, Recipe
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.types import Json

if TYPE_CHECKING:  # imported where needed: a build that is up to date needs neither module
    from canvasrt.runtime.request import Request
    from canvasrt.runtime.tokenizer import Tokenizer

PROMPT_KINDS = ("prompt", "messages", "prompt_ids")
_HINT = (
    'a line is {"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}]}'
    ' or {"prompt_ids": [...]}'
)


# Maximum size in bytes of the keys and values of concurrent requests. Further requests wait.
CACHE_BYTES = 4 * 10**9


def check_calibration(file: Path | None, is_calibrated: bool, what: str) -> None:
    """Check the option for calibration prompts.

    Raises UsageError if there is a file although `is_calibrated` is false; the message says that `what` needs no
    calibration. Raises CanvasError if the file does not exist.
    """
    if file is None:
        return
    if not is_calibrated:
        raise UsageError(
            f"--calibration has no effect: {what} needs no calibration",
            "leave --calibration out, or choose a recipe that quantizes activations",
        )
    if not file.expanduser().is_file():
        raise CanvasError(
            f"no calibration file at {file}", "give a JSONL file of prompts, or leave it out"
        )


def default_prompts(files: Mapping[str, str] | None) -> Path:
    """Return the file of canvasrt's own prompts: the demo's for a bundled checkpoint, general prompts otherwise.

    files: the SHA-256 of the checkpoint's files.
    """
    import canvasrt.recipes

    bundled = map(checkpoints.demo_checkpoint, checkpoints.BUNDLED)
    if files and any(files == checkpoints.fingerprint(each) for each in bundled):
        return checkpoints.DEMO_FOLDER / "calibration.jsonl"
    return Path(canvasrt.recipes.__path__[0]) / "prompts.jsonl"


@dataclass(frozen=True)
class Workload:
    """The work of a calibration if no request stops early.

    Attributes:
        prompts: number of prompts. together: maximum number of concurrent requests.
        cached: maximum size in bytes of the keys and values of concurrent requests.
        passes: number of denoising passes. sweeps: number of sweeps over the weights.
        tokens: number of clean tokens in prompts and answers.
        attended: for each kind of attention, the number of query-key pairs in one layer, over all passes.
    """

    prompts: int
    together: int
    cached: int
    passes: int
    sweeps: int
    tokens: int
    attended: Mapping[str, int]


def most_passes(request: Request, config: ModelConfig) -> int:
    """Return the number of denoising passes of a request that never stops early."""
    return request.params.blocks(config) * request.params.max_denoising_steps


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the size in bytes of a request's keys and values, in float32, after `tokens` tokens."""
    kept = {"sliding": min(tokens, config.sliding_window - 1), "full": tokens}
    return sum(8 * each.num_kv_heads * each.head_dim * kept[each.kind] for each in config.layers)


@dataclass(frozen=True)
class CalibrationPrompts:
    """The prompts of a file, as requests."""

    file: Path
    tokenizer: Tokenizer | None
    config: ModelConfig
    sampler: SamplerDefaults
    settings: CalibrationSettings
    max_context: int

    @classmethod
    def of(
        cls,
        file: Path | None,
        recipe: Recipe,
        model: ModelConfig,
        sampler: SamplerDefaults,
        made_from: Mapping[str, Any],
        tokenizer: Mapping[str, Path],
    ) -> CalibrationPrompts:
        """Return the prompts of `file` with the calibration settings of `recipe`. If `file` is None, use canvasrt's own
        prompts for the checkpoint in `made_from`.

        tokenizer: the tokenizer's files by name; empty if the model has none.
        """
        chosen = file.expanduser() if file else default_prompts(made_from.get("files"))
        context = min(model.max_position_embeddings, MAX_CONTEXT)
        found = _tokenizer(tuple(tokenizer.items())) if tokenizer else None
        return cls(chosen, found, model, sampler, recipe.calibration, context)

    @cached_property
    def work(self) -> Workload:
        """The work of all requests. Checks all lines, and raises CanvasError for an invalid line."""
        import numpy as np

        from canvasrt.runtime.prefix import chunks_of

        passes: list[int] = []
        # The number of sweeps of each request: one per denoising pass, plus one per prompt chunk except the last.
        # The last chunk and finished blocks are encoded in the same sweep as a denoising pass.
        chains: list[int] = []
        longest = tokens = 0
        kept = {"sliding": self.config.sliding_window - 1, "full": self.max_context}
        attended = dict.fromkeys(kept, 0)
        for number, request in self._requests():
            self._validate(number, request)
            blocks, canvas = request.params.blocks(self.config), request.params.canvas(self.config)
            answer = blocks * canvas
            tokens += len(request.prompt_token_ids) + answer
            longest = max(longest, len(request.prompt_token_ids) + answer)
            passes.append(most_passes(request, self.config))
            chunks = chunks_of(np.array(request.prompt_token_ids), PREFILL_CHUNK)
            chains.append(len(chunks) - 1 + passes[-1])
            # A block's denoising passes, plus the pass that encodes it; the last block is not encoded.
            steps = request.params.max_denoising_steps
            rounds = [(canvas, steps + 1)] * (blocks - 1) + [(canvas, steps)]
            start = 0
            for length, times in [*((len(each.tokens), 1) for each in chunks), *rounds]:
                for kind, most in kept.items():
                    attended[kind] += times * length * (min(start, most) + length)
                start += length
        if not passes:
            raise CanvasError(f"{self.file} contains no prompts", _HINT)
        # Also check the format of the lines after the last prompt that runs.
        for number, line in self._lines():
            self._parse(number, line)
        each = cache_bytes(self.config, longest)
        together = max(1, min(len(passes), CACHE_BYTES // each))
        sweeps = _most_sweeps(chains, together)
        memory = together * each
        return Workload(len(passes), together, memory, sum(passes), sweeps, tokens, attended)

    @property
    def sha256(self) -> str:
        """The file's SHA-256."""
        try:
            return hashlib.sha256(self.file.read_bytes()).hexdigest()
        except OSError as error:
            raise self._unreadable(error) from error

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order, up to the recipe's number of prompts. One line is in memory at a time."""
        return (request for _, request in self._requests())

    def _requests(self) -> Iterator[tuple[int, Request]]:
        """Yield the number of each request's line, and the request."""
        from canvasrt.runtime.request import Request

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
        """Return a prompt's parameters. The prompts that do not stop early are spread evenly over the file, starting
        with the first prompt."""
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
            with self.file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, self._decode(number, line)
        except OSError as error:
            raise self._unreadable(error) from error

    def _decode(self, number: int, line: bytes) -> str:
        try:
            return line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self._wrong(number, f"it is not UTF-8 ({error.reason})") from error

    def _ids(self, number: int, line: str) -> list[int]:
        kind, value = self._parse(number, line)
        if kind == "prompt_ids":
            return value
        ids_hint = 'give token ids: {"prompt_ids": [...]}'
        if self.tokenizer is None:
            raise self._wrong(number, "the model has no tokenizer", ids_hint)
        chat = value if kind == "messages" else [{"role": "user", "content": value}]
        try:
            return self.tokenizer.encode_chat(chat)
        except CanvasError as error:
            if not self.tokenizer.has_template:
                raise self._wrong(number, error.message, ids_hint) from error
            raise self._wrong(number, error.message, error.hint) from error

    def _parse(self, number: int, line: str) -> tuple[str, Any]:
        """Return the kind of the line's prompt, one of `PROMPT_KINDS`, and the prompt. All other keys are ignored."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._wrong(
                number, f"it is not JSON ({error.msg.removesuffix(' at')}, column {error.colno})"
            ) from error
        except (ValueError, RecursionError) as error:  # a number is too long, or a list too deep
            raise self._wrong(number, f"it cannot be read as JSON ({error})") from error
        kinds = [kind for kind in PROMPT_KINDS if isinstance(data, dict) and kind in data]
        if len(kinds) != 1:
            raise self._wrong(number, f"it needs exactly one of {', '.join(PROMPT_KINDS)}")
        (kind,) = kinds
        value = data[kind]
        if not _FITS[kind](value):
            raise self._wrong(number, f"its {kind} is {_short(value)}")
        return kind, value

    def _unreadable(self, error: Exception) -> CanvasError:
        why = getattr(error, "strerror", None) or error
        return CanvasError(f"cannot read {self.file}: {why}", _HINT)

    def _wrong(self, number: int, message: str, hint: str = _HINT) -> CanvasError:
        return CanvasError(f"{self.file}, line {number}: {message}", hint)


def _most_sweeps(chains: Sequence[int], together: int) -> int:
    """Return the number of sweeps for all requests. `chains` has each request's number of sweeps. Up to `together`
    requests share each sweep; when a request ends, the next one starts."""
    ends = [0] * together
    for chain in chains:
        heapq.heappush(ends, heapq.heappop(ends) + chain)
    return max(ends)


@lru_cache(1)  # cached, because a large tokenizer takes a second to load
def _tokenizer(files: tuple[tuple[str, Path], ...]) -> Tokenizer:
    from canvasrt.runtime.tokenizer import Tokenizer

    return Tokenizer.read(dict(files))


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
    )


_FITS = {
    "prompt": lambda value: isinstance(value, str) and bool(value.strip()),
    "messages": _is_chat,
    "prompt_ids": lambda value: (
        isinstance(value, list)
        and {*map(type, value)} <= {int}
        and all(abs(each) < 1 << 31 for each in value)
    ),
}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 60 else f"{text[:60]}…"


# The two kinds of unfinished work, and the file with a calibration's result. This file is kept after the work. If the
# graphs are made again later, they get the same scales, even with a different number of layers per segment.
CALIBRATIONS, QUANTIZATIONS = "calibrations", "quantizations"
CALIBRATED = "calibrated.json"


def work_of(source: Json, recipe: Recipe, prompts: CalibrationPrompts | None) -> Json:
    """Return all inputs that determine a calibration. Together with the division into segments, they also determine a
    quantization. These inputs identify interrupted work that can be resumed."""
    return {
        **source,
        "recipe": recipe.to_json(),
        "prompts": prompts and prompts.work and prompts.sha256,
        "made_by": versions(QUANTIZED_BY, "export", "runtime"),
    }
