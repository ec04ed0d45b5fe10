"""Whether requests may share passes: tried on the GPU that serves, with its engines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvasrt.runtime.gpu.device_cache import DeviceRow
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.passes import DenoiseInput, EncodeInput

# How many different tokens a canvas has: the fewer, the more of them go to the same experts.
_KINDS = (1 << 30, 64, 1)
# Every shared pass reads the cached tokens of the longest request that there may be. Beyond this, four short requests in passes
# of their own are faster on some GPUs and slower on others (bench/results/predicted.json), so nothing is shared unasked.
WIDEST = 8192


@dataclass(frozen=True)
class Evidence:
    """What was found: whether requests share passes, whether a lone one has passes of its own even so, how many results were
    compared, and why one of both is not so."""

    shared: bool
    lone: bool
    compared: int
    why: str = ""


def prove(model: DeviceModel) -> Evidence:
    """Let requests share passes if a request computes the same bits alone, at every place, beside random others and at several
    loads of experts. Run every shape that passes then have. No request may be running."""
    if (most := model.shapes.widths[-1]) > WIDEST:
        model.warm_up()
        return Evidence(
            False, False, 0, f"each pass would read {most} cached tokens, over {WIDEST}"
        )
    model.share_passes(True)
    model.warm_up()
    compared, differs = 0, {"alone": "", "in company": "", "in a pass for one": ""}
    random = np.random.default_rng(0)
    vocab, length = model.config.vocab_size, model.canvas_length
    for kind in _KINDS:
        prompt, canvas = random.integers(0, vocab, 40), _tokens(random, vocab, kind, length)
        wanted = b""
        for place in range(model.max_batch):
            rows = [model.new_row() for _ in range(model.max_batch)]
            prompts = [random.integers(0, vocab, int(random.integers(1, 100))) for _ in rows]
            prompts[place] = prompt
            model.encode([EncodeInput(*each) for each in zip(rows, prompts, strict=True)])
            others = [_tokens(random, vocab, int(random.choice(_KINDS)), length) for _ in rows]
            others[place] = canvas
            given = [_step(model, *each) for each in zip(rows, others, strict=True)]
            for how, inputs in (
                ("alone", [given[place]]),
                ("in company", given),
                ("in a pass for one", [given[place]]),
            ):
                model.lone = how == "in a pass for one"
                found = _bits(model, rows[place], inputs, inputs.index(given[place]))
                wanted = wanted or found
                compared += 1
                if found != wanted and not differs[how]:
                    tokens = min(kind, length)
                    differs[how] = (
                        f"bits differ {how}, at place {place}, with {tokens} different tokens"
                    )
            for row in rows:
                model.release(row)
    model.lone = not differs["in a pass for one"]
    why = differs["alone"] or differs["in company"]
    if why:
        model.lone = False
        model.share_passes(False)
        model.warm_up()
    return Evidence(not why, model.lone, compared, why or differs["in a pass for one"])


def _tokens(random: np.random.Generator, vocab: int, kind: int, length: int) -> np.ndarray:
    return random.integers(0, min(vocab, kind), length)


def _step(model: DeviceModel, row: DeviceRow, canvas: np.ndarray) -> DenoiseInput:
    random, length = np.random.default_rng(1), len(canvas)
    uniforms = random.random(length, np.float32)
    noise = random.integers(0, model.config.vocab_size, length)
    hidden = model.first_hidden(canvas)
    return DenoiseInput(row, hidden, np.float32(0.7), 0.1, uniforms, noise, outputs="both")


def _bits(model: DeviceModel, row: DeviceRow, inputs: list[DenoiseInput], index: int) -> bytes:
    """Return all that a request gets of a pass."""
    out = model.denoise(inputs)[index]
    row.loads.clear()
    arrays = (out.canvas, out.argmax, out.entropy, out.accepted, out.hidden)
    parts = [np.asarray(each).tobytes() for each in arrays]
    return b"".join([*parts, model._fetch(row, out.next_hidden).tobytes()])
