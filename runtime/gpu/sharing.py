"""Tests the loaded engines on the serving GPU: can requests share passes without any change to results?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from canvasrt.expert_slots import ROOMY
from canvasrt.runtime.gpu.device_cache import DeviceRow
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.gpu.launches import OwnPasses
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput

# Limits on a canvas's distinct tokens. The fewer there are, the more tokens are routed to the same experts.
_DISTINCT = (1 << 30, 64, 8, 1)
_PROMPT = 40  # tokens
_RUNS = 4  # timed runs; the fastest one counts


@dataclass(frozen=True)
class Evidence:
    """The test's result: whether requests share passes, how many results were compared, and the first difference.

    shared_ms: duration of a full shared pass. own_ms: duration of a request's own pass, by width. The durations are set
    only if shared passes agree with each other.
    """

    shared: bool
    compared: int
    why: str = ""
    shared_ms: float = 0.0
    own_ms: dict[int, float] = field(default_factory=dict)


def prove(model: DeviceModel) -> Evidence:
    """Let requests share passes if sharing changes no bits of a request's results.

    Runs a request in own passes of every width, and in shared passes: alone, with random requests, in every kv slot,
    and with several loads of experts. If all results have the same bits, every step may use the faster kind of pass. If
    bits differ, requests do not share passes, because tokens would then depend on timing. Also warms up all shapes of
    the resulting plan. Call this only while no request is running.
    """
    if model.max_context <= model.canvas_length:
        model.warm_up()
        return Evidence(False, 0, "the context has no room for a whole canvas", 0.0, {})
    model.share_passes(True)
    widths = model.shapes.widths
    model.warm_up()
    trial = _Trial(model)
    for distinct in _DISTINCT:
        trial.compare(distinct, min(_PROMPT, trial.longest), range(model.max_batch))
    # Kernels may split the cached tokens differently for every width, so every width is also tested with a full cache.
    for number, width in enumerate(widths):
        length = min(width, model.max_context - model.canvas_length)
        trial.compare(_DISTINCT[0], length, [number % model.max_batch])
    why, times = trial.differs.get(0, ""), (0.0, dict[int, float]())
    if not why:
        own, shared = trial.seconds()
        times = round(1e3 * shared, 2), {width: round(1e3 * each, 2) for width, each in own.items()}
        if not trial.differs:
            model.own_passes = OwnPasses(widths, own, shared)
            return Evidence(True, trial.compared, "", *times)
        why = (
            f"{next(iter(trial.differs.values()))}; shared passes agree with each other, so `--share-passes on` is "
            f"exact, too; a shared pass takes {times[0]} ms, and a request's own pass {min(times[1].values())} ms"
        )
    model.share_passes(False)
    model.warm_up()
    return Evidence(False, trial.compared, why, *times)


def digest(model: DeviceModel) -> str:
    """Return a hash of one request's results: in its own pass at every width and, if requests can share passes, in a
    shared pass with others. Every call uses the same requests. Call this only while no request is running."""
    kept, trial = model.own_passes, _Trial(model)
    given = trial.requests({})
    ways = [*model.shapes.widths, *([0] if model.shapes.shares else [])]
    found = b"".join(trial.bits(width, given if not width else given[:1], 0) for width in ways)
    trial.release(given)
    model.own_passes = kept
    return sha256(found).hexdigest()


class _Trial:
    """Compares a request's results. `differs` holds the first difference of each kind of pass; its key is the width of
    a request's own pass, or 0 for shared passes."""

    def __init__(self, model: DeviceModel) -> None:
        self._model, self._random = model, np.random.default_rng(0)
        self.compared, self.differs = 0, dict[int, str]()
        # The length of the longest prompt, in tokens. Such a prompt fits every width.
        self.longest = max(
            1, min(99, model.shapes.widths[0], model.max_context - model.canvas_length)
        )

    def compare(self, distinct: int, length: int, places: Sequence[int]) -> None:
        """In every kv slot in `places`, compare one request's results: alone in a shared pass, with random requests in
        a shared pass, and in own passes. The request has a prompt of `length` tokens and a canvas of at most
        `distinct` distinct tokens."""
        model, wanted = self._model, b""
        prompt, canvas = self._tokens(length), self._tokens(model.canvas_length, distinct)
        for place in places:
            given = self.requests({place: (prompt, canvas)})
            one = [given[place]]
            ways = [(0, "alone", one), (0, "with other requests", given)]
            ways += [
                (width, f"in the request's own pass over {width} cached tokens", one)
                for width in model.shapes.widths
                if width >= length
            ]
            for width, how, inputs in ways:
                found = self.bits(width, inputs, inputs.index(given[place]))
                wanted = wanted or found
                self.compared += 1
                if found != wanted:
                    tokens = min(distinct, model.canvas_length)
                    what = f"bits differ {how}, in kv slot {place}, with {tokens} distinct tokens"
                    self.differs.setdefault(width, what)
            self.release(given)

    def seconds(self) -> tuple[dict[int, float], float]:
        """Return the durations of own passes, keyed by width, and the duration of a full shared pass, in seconds."""
        given = self.requests({})
        own = {width: self._fastest(width, given[:1]) for width in self._model.shapes.widths}
        shared = self._fastest(0, given)
        self.release(given)
        return own, shared

    def _fastest(self, width: int, inputs: Sequence[DenoiseInput]) -> float:
        taken = []
        for _ in range(_RUNS):
            begin = time.perf_counter()
            self._denoise(width, inputs)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def requests(self, chosen: dict[int, tuple[np.ndarray, np.ndarray]]) -> list[DenoiseInput]:
        """Return a request for every kv slot. `chosen` maps slots to prompts and canvases; other requests are
        random."""
        model, random, given = self._model, self._random, []
        for place in range(model.max_batch):
            few = int(random.choice(_DISTINCT)) if chosen else _DISTINCT[0]
            prompt = self._tokens(int(random.integers(1, self.longest + 1)))
            prompt, canvas = chosen.get(place, (prompt, self._tokens(model.canvas_length, few)))
            row = model.new_row()
            _fill(model, row, prompt)
            given.append(_step(model, row, canvas))
        return given

    def _tokens(self, length: int, distinct: int = _DISTINCT[0]) -> np.ndarray:
        return self._random.integers(0, min(self._model.config.vocab_size, distinct), length)

    def release(self, given: Sequence[DenoiseInput]) -> None:
        for each in given:
            self._model.release(each.row)

    def _denoise(self, width: int, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Run an own pass of width `width`, or a shared pass if `width` is 0."""
        widths = self._model.shapes.widths
        self._model.own_passes = OwnPasses(widths, {width: 0.0} if width else {})
        found = self._model.denoise(inputs)
        for each in inputs:
            each.row.needs.clear()
        return found

    def bits(self, width: int, inputs: Sequence[DenoiseInput], index: int) -> bytes:
        """Run a pass, and return all outputs of the request `inputs[index]` as bytes."""
        out, row = self._denoise(width, inputs)[index], inputs[index].row
        arrays = (out.canvas, out.argmax, out.entropy, out.accepted, out.hidden)
        parts = [np.asarray(each).tobytes() for each in arrays]
        return b"".join([*parts, self._model._fetch(row, out.next_hidden).tobytes()])


def _fill(model: DeviceModel, row: DeviceRow, prompt: np.ndarray) -> None:
    """Fill a request's caches to the length of `prompt`. Only the beginning of the prompt, which cannot overflow an
    expert, is encoded; the resulting keys and values are appended repeatedly. Encoding 262,144 tokens at every start
    would take minutes."""
    first = prompt[: min(ROOMY, model.prefill_chunk)]
    model.encode([EncodeInput(row, first)])
    length = model.shapes.encode(len(first), model.shapes.widths[0]).length
    while row.length < len(prompt):
        model.append(row, length, min(len(first), len(prompt) - row.length))


def _step(model: DeviceModel, row: DeviceRow, canvas: np.ndarray) -> DenoiseInput:
    random, length = np.random.default_rng(1), len(canvas)
    uniforms = random.random(length, np.float32)
    noise = random.integers(0, model.config.vocab_size, length)
    hidden = model.first_hidden(canvas)
    return DenoiseInput(row, hidden, np.float32(0.7), 0.1, uniforms, noise, outputs="both")
