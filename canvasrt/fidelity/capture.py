"""Records the inputs and outputs of all layers of the reference, pass by pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from canvasrt.fidelity.reference import ReferenceModel, ReferenceRow

PassKind = Literal["encode", "denoise"]


@dataclass
class CapturedPass:
    """One pass of the reference. Lists are indexed by layer."""

    phase: PassKind
    length: int  # number of clean tokens in the cache before the pass
    hidden: list[np.ndarray] = field(default_factory=list)  # [1, L, D], the layer's input
    out: np.ndarray = field(default_factory=lambda: np.empty(0))  # output of the last layer
    past_keys: list[np.ndarray] = field(default_factory=list)  # [1, kv_heads, kept, head_dim]
    past_values: list[np.ndarray] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)  # only of this pass's tokens
    values: list[np.ndarray] = field(default_factory=list)
    # The tokens that reached the layer's experts, [T, D] float32, and the experts chosen for each token, [T, k].
    routed: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def outputs(self) -> list[np.ndarray]:
        """Return each layer's output `[1, L, D]`."""
        return [*self.hidden[1:], self.out]


@contextlib.contextmanager
def captured(
    reference: ReferenceModel, row: ReferenceRow, phase: PassKind, into: list[CapturedPass] | None
) -> Iterator[None]:
    """Record the single pass of `row` that runs inside the `with` block, and append it to `into`. If `into` is None, do
    nothing."""
    if into is None:
        yield
        return
    inner = reference.module.model
    layers: Any = (
        inner.decoder.layers if phase == "denoise" else inner.encoder.language_model.layers
    )
    seen = CapturedPass(phase, row.length)
    if row.length:
        seen.past_keys = [_copy(layer.keys) for layer in row.cache.layers]
        seen.past_values = [_copy(layer.values) for layer in row.cache.layers]

    def routed(_: Any, given: tuple[Any, ...]) -> None:
        seen.routed.append((_copy(given[0]), _copy(given[1])))

    def appended(append: Any, cache: Any, keys: Any, values: Any) -> Any:
        seen.keys.append(_copy(keys))
        seen.values.append(_copy(values))
        return append(cache, keys, values)

    hooks = []
    for layer in layers:
        hooks.append(
            layer.register_forward_pre_hook(lambda _, given: seen.hidden.append(_copy(given[0])))
        )
        hooks.append(layer.experts.register_forward_pre_hook(routed))
        if phase == "denoise":
            layer.self_attn.append_to_cache = partial(appended, layer.self_attn.append_to_cache)
    hooks.append(
        layers[-1].register_forward_hook(lambda *each: setattr(seen, "out", _copy(each[2])))
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.self_attn.__dict__.pop("append_to_cache", None)
    if phase == "encode":
        kept = [min(layer.keys.shape[2], row.length - seen.length) for layer in row.cache.layers]
        pairs = list(zip(row.cache.layers, kept, strict=True))
        seen.keys = [_copy(layer.keys[:, :, -count:]) for layer, count in pairs]
        seen.values = [_copy(layer.values[:, :, -count:]) for layer, count in pairs]
    into.append(seen)


def _copy(tensor: Any) -> np.ndarray:
    # A copy is needed, because layers scale their result in place.
    return tensor.detach().numpy().copy()
