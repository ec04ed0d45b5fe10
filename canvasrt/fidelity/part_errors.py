"""Measures the error of every segment and layer. Each gets the reference's inputs, so that errors do not accumulate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from canvasrt.fidelity.capture import CapturedPass
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.stats import RelativeError
from canvasrt.pass_shapes import DENOISE, ENCODE
from canvasrt.progress import report
from canvasrt.runtime.body_inputs import expert_slots
from canvasrt.runtime.engine import Arrays, Segment
from canvasrt.runtime.host_model import HostModel
from canvasrt.runtime.kv_cache import RequestCache, past_feeds, token_feeds
from canvasrt.types import Json

# Phase → the relative error of outputs in that phase.
ByPhase = dict[str, RelativeError]


def part_errors(
    observed: ObservedModel, passes: Sequence[CapturedPass]
) -> tuple[list[Json], list[Json]]:
    """Run the body segments, as a whole and layer by layer, on the reference's inputs in `passes`.

    Return the segments' errors and the layers' errors, separately for each phase.
    """
    assert observed.backend is not None
    assert isinstance(observed.model, HostModel)
    config = observed.model.config
    bodies = [entry for entry in observed.bundle.manifest.segments if "layers" in entry]
    segments, layers = [], []
    for number, entry in enumerate(bodies):
        report("running segments on the reference's inputs", number, len(bodies))
        held = entry["layers"]
        errors = {name: _phases() for name in ("hidden_out", "keys", "values")}
        each = [_phases() for _ in held]
        whole, cut = observed.backend.segments[entry["name"]], observed.layers(entry)
        # One segment runs for all passes before the next segment runs, so that a streamed segment is opened only once.
        for seen in passes:
            _compare_segment(whole, _feeds(seen, observed.model, held), seen, held, errors)
        for seen in passes:
            _compare_layers(cut, _feeds(seen, observed.model, held), seen, held, each)
        found = {name: _values(one) for name, one in errors.items()}
        segments.append({"name": entry["name"], "layers": list(held)} | found)
        layers += [
            {"layer": layer, "kind": config.layers[layer].kind} | _values(one)
            for layer, one in zip(held, each, strict=True)
        ]
    report("running segments on the reference's inputs", len(bodies), len(bodies))
    return segments, layers


def _compare_segment(
    segment: Segment,
    feeds: Arrays,
    seen: CapturedPass,
    layers: Sequence[int],
    errors: Mapping[str, ByPhase],
) -> None:
    out = _run(segment, feeds)
    errors["hidden_out"][seen.phase].add(out["hidden_out"], seen.outputs()[layers[-1]])
    for layer in layers:
        # Compare only the end of a long prompt if a sliding layer's cache no longer contains the start.
        for ours, expected, sums in (
            (out[f"new_key_{layer}"], seen.keys[layer], errors["keys"]),
            (out[f"new_value_{layer}"], seen.values[layer], errors["values"]),
        ):
            sums[seen.phase].add(ours[:, :, -expected.shape[2] :], expected)


def _compare_layers(
    segment: Segment,
    feeds: Arrays,
    seen: CapturedPass,
    layers: Sequence[int],
    errors: Sequence[ByPhase],
) -> None:
    inner = {f"hidden_{k}": seen.hidden[layer] for k, layer in enumerate(layers) if k}
    out = _run(segment, feeds | inner)
    for k, (layer, error) in enumerate(zip(layers, errors, strict=True)):
        name = "hidden_out" if layer == layers[-1] else f"hidden_out_{k}"
        error[seen.phase].add(out[name], seen.outputs()[layer])


def _run(segment: Segment, feeds: Mapping[str, np.ndarray]) -> Arrays:
    return segment.run({name: feeds[name] for name in segment.inputs})


def _feeds(seen: CapturedPass, model: HostModel, layers: Sequence[int]) -> Arrays:
    """Return a segment's inputs, in the runtime's form, from the reference's hidden states and cache."""
    config = model.config
    cache = RequestCache(config)
    for layer, both in enumerate(zip(seen.past_keys, seen.past_values, strict=True)):
        cache.append(layer, *both)
    cache.advance(seen.length)
    hidden = seen.hidden[layers[0]]
    count = hidden.shape[1]
    positions = np.arange(seen.length, seen.length + count, dtype=np.int64)[None]
    given = past_feeds([cache]) | token_feeds(positions, causal=seen.phase == ENCODE)
    return {
        "hidden": hidden,
        **model.geometry.complete(given),
        # Every expert has a slot for each token, so that no expert can overflow.
        **expert_slots(count, config.num_experts),
    }


def _phases() -> ByPhase:
    return {ENCODE: RelativeError(), DENOISE: RelativeError()}


def _values(errors: ByPhase) -> dict[str, float]:
    return {phase: error.value for phase, error in errors.items()}
