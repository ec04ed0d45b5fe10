"""The error of each segment and layer on the reference's inputs, so that errors do not add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from canvasrt.fidelity.capture import CapturedPass
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.stats import RelativeError
from canvasrt.pass_shapes import DENOISE, ENCODE
from canvasrt.progress import Progress
from canvasrt.runtime.body_inputs import expert_slots
from canvasrt.runtime.cpu import HostModel
from canvasrt.runtime.engine import Arrays, Segment
from canvasrt.runtime.kv_cache import RequestCache, past_feeds, token_feeds


@dataclass
class SegmentErrors:
    """Relative errors of a segment's outputs, by phase."""

    name: str
    layers: Sequence[int]
    hidden: dict[str, RelativeError] = field(default_factory=lambda: _phases())
    keys: dict[str, RelativeError] = field(default_factory=lambda: _phases())
    values: dict[str, RelativeError] = field(default_factory=lambda: _phases())

    def to_json(self) -> dict[str, Any]:
        """Return one number per phase for each output."""
        outputs = {"hidden_out": self.hidden, "keys": self.keys, "values": self.values}
        return {
            "name": self.name,
            "layers": list(self.layers),
            **{name: _values(errors) for name, errors in outputs.items()},
        }


@dataclass
class LayerErrors:
    """The relative error of one layer's output, by phase."""

    layer: int
    kind: str
    hidden: dict[str, RelativeError] = field(default_factory=lambda: _phases())

    def to_json(self) -> dict[str, Any]:
        """Return one number per phase."""
        return {"layer": self.layer, "kind": self.kind, **_values(self.hidden)}


def part_errors(
    observed: ObservedModel, passes: Sequence[CapturedPass], progress: Progress
) -> tuple[list[SegmentErrors], list[LayerErrors]]:
    """Run every body segment on the inputs of the reference's layers in `passes`, as a whole and
    layer by layer."""
    assert observed.backend is not None
    assert isinstance(observed.model, HostModel)
    config = observed.model.config
    bodies = [entry for entry in observed.bundle.manifest.segments if "layers" in entry]
    segments, layers = [], []
    for number, entry in enumerate(bodies):
        progress("running segments on the reference's inputs", number, len(bodies))
        held = entry["layers"]
        errors = SegmentErrors(entry["name"], held)
        each = [LayerErrors(layer, config.layers[layer].kind) for layer in held]
        whole, cut = observed.backend.segments[entry["name"]], observed.layers(entry)
        # One after the other: a streamed segment is opened once for all passes.
        for seen in passes:
            _compare_segment(whole, _feeds(seen, observed.model, held), seen, errors)
        for seen in passes:
            _compare_layers(cut, _feeds(seen, observed.model, held), seen, each)
        segments.append(errors)
        layers += each
    progress("running segments on the reference's inputs", len(bodies), len(bodies))
    return segments, layers


def _compare_segment(
    segment: Segment, feeds: Arrays, seen: CapturedPass, errors: SegmentErrors
) -> None:
    out = _run(segment, feeds)
    errors.hidden[seen.phase].add(out["hidden_out"], seen.outputs()[errors.layers[-1]])
    for layer in errors.layers:
        # A sliding layer's cache no longer holds the start of a long prompt.
        for ours, expected, sums in (
            (out[f"new_key_{layer}"], seen.keys[layer], errors.keys),
            (out[f"new_value_{layer}"], seen.values[layer], errors.values),
        ):
            sums[seen.phase].add(ours[:, :, -expected.shape[2] :], expected)


def _compare_layers(
    segment: Segment, feeds: Arrays, seen: CapturedPass, errors: Sequence[LayerErrors]
) -> None:
    inner = {f"hidden_{k}": seen.hidden[each.layer] for k, each in enumerate(errors) if k}
    out = _run(segment, feeds | inner)
    for k, each in enumerate(errors):
        name = "hidden_out" if each is errors[-1] else f"hidden_out_{k}"
        each.hidden[seen.phase].add(out[name], seen.outputs()[each.layer])


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
        # Room for every token at one expert: nothing overflows.
        **expert_slots(count, config.num_experts),
    }


def _phases() -> dict[str, RelativeError]:
    return {ENCODE: RelativeError(), DENOISE: RelativeError()}


def _values(errors: Mapping[str, RelativeError]) -> dict[str, float]:
    return {phase: error.value for phase, error in errors.items()}
