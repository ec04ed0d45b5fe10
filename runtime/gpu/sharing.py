"""Whether requests may share passes: tried on the GPU that serves, with its engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from canvasrt.pass_shapes import ROOMY
from canvasrt.runtime.gpu.device_cache import DeviceRow
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.gpu.launches import OwnPasses
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput

# How many different tokens a canvas has: the fewer, the more of them go to the same experts.
_KINDS = (1 << 30, 64, 8, 1)
_PROMPT = 40  # tokens
_RUNS = 4  # of which the fastest counts


@dataclass(frozen=True)
class Evidence:
    """What was found: whether requests share passes, how many results were compared, and what differed.

    shared_ms: a full shared pass. own_ms: by width, a request's own pass. Both only where requests share passes.
    """

    shared: bool
    compared: int
    why: str = ""
    shared_ms: float = 0.0
    own_ms: dict[int, float] = field(default_factory=dict)


def prove(model: DeviceModel) -> Evidence:
    """Let requests share passes if a request computes the same bits alone, at every place, beside random others, at several
    loads of experts, and in passes of its own over every width. Then every step may take what is faster; a choice between
    passes of other bits would make tokens depend on timing. Run every shape that passes then have. No request may be running."""
    model.share_passes(True)
    widths = model.shapes.widths
    model.warm_up()
    trial = _Trial(model)
    for kind in _KINDS:
        trial.compare(kind, _PROMPT, range(model.max_batch))
    # Kernels may part a past by its width, so each width is tried full as well.
    for number, width in enumerate(widths):
        length = min(width, model.max_context - model.canvas_length)
        trial.compare(_KINDS[0], length, [number % model.max_batch])
    if trial.differs:
        model.share_passes(False)
        model.warm_up()
        return Evidence(
            False, trial.compared, trial.differs.get(0, next(iter(trial.differs.values())))
        )
    own, shared = trial.seconds()
    model.own_passes = OwnPasses(widths, own, shared)
    milliseconds = {width: round(1e3 * each, 2) for width, each in own.items()}
    return Evidence(True, trial.compared, "", round(1e3 * shared, 2), milliseconds)


class _Trial:
    """Compares a request's results. `differs` has the first difference by the width of an own pass; by 0, in a shared pass."""

    def __init__(self, model: DeviceModel) -> None:
        self._model, self._random = model, np.random.default_rng(0)
        self.compared, self.differs = 0, dict[int, str]()

    def compare(self, kind: int, length: int, places: Sequence[int]) -> None:
        """Compare a canvas of `kind` different tokens, after a prompt of `length`, at places alone, beside others, and in
        passes of its own."""
        model, wanted = self._model, b""
        prompt, canvas = self._tokens(length), self._tokens(model.canvas_length, kind)
        for place in places:
            given = self._requests({place: (prompt, canvas)})
            one = [given[place]]
            ways = [(0, "alone", one), (0, "in company", given)]
            ways += [
                (width, f"in a pass of its own over {width} cached tokens", one)
                for width in model.shapes.widths
                if width >= length
            ]
            for width, how, inputs in ways:
                found = self._bits(width, inputs, inputs.index(given[place]))
                wanted = wanted or found
                self.compared += 1
                if found != wanted:
                    tokens = min(kind, model.canvas_length)
                    what = f"bits differ {how}, at place {place}, with {tokens} different tokens"
                    self.differs.setdefault(width, what)
            self._release(given)

    def seconds(self) -> tuple[dict[int, float], float]:
        """Return what a pass of a request's own takes, by width, and a shared one of all."""
        given = self._requests({})
        own = {width: self._fastest(width, given[:1]) for width in self._model.shapes.widths}
        shared = self._fastest(0, given)
        self._release(given)
        return own, shared

    def _fastest(self, width: int, inputs: Sequence[DenoiseInput]) -> float:
        taken = []
        for _ in range(_RUNS):
            begin = time.perf_counter()
            self._denoise(width, inputs)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def _requests(self, chosen: dict[int, tuple[np.ndarray, np.ndarray]]) -> list[DenoiseInput]:
        """Return requests for every place, random but for the prompts and canvases of those that are chosen."""
        model, random, given = self._model, self._random, []
        for place in range(model.max_batch):
            few = int(random.choice(_KINDS)) if chosen else _KINDS[0]
            prompt = self._tokens(int(random.integers(1, 100)))
            prompt, canvas = chosen.get(place, (prompt, self._tokens(model.canvas_length, few)))
            row = model.new_row()
            _fill(model, row, prompt)
            given.append(_step(model, row, canvas))
        return given

    def _tokens(self, length: int, kind: int = _KINDS[0]) -> np.ndarray:
        return self._random.integers(0, min(self._model.config.vocab_size, kind), length)

    def _release(self, given: Sequence[DenoiseInput]) -> None:
        for each in given:
            self._model.release(each.row)

    def _denoise(self, width: int, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Run a shared pass, or with a width, one of the request's own."""
        widths = self._model.shapes.widths
        self._model.own_passes = OwnPasses(widths, {width: 0.0} if width else {})
        found = self._model.denoise(inputs)
        for each in inputs:
            each.row.loads.clear()
        return found

    def _bits(self, width: int, inputs: Sequence[DenoiseInput], index: int) -> bytes:
        """Return all that a request gets of a pass."""
        out, row = self._denoise(width, inputs)[index], inputs[index].row
        arrays = (out.canvas, out.argmax, out.entropy, out.accepted, out.hidden)
        parts = [np.asarray(each).tobytes() for each in arrays]
        return b"".join([*parts, self._model._fetch(row, out.next_hidden).tobytes()])


def _fill(model: DeviceModel, row: DeviceRow, prompt: np.ndarray) -> None:
    """Fill a request's caches. Of its prompt, only as much as overflows no expert is encoded, and copied until it is long
    enough: to encode 262,144 tokens at every start would take minutes."""
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
