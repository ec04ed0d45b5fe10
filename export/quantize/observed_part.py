"""Float32 layers and head that record the inputs to their weight matrices.

These are the modules that graphs are traced from, except that experts run one after another, and attention processes
one request after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from canvasrt.checkpoints.weight_names import DOWN, GATE_UP, TABLE
from canvasrt.errors import CanvasError
from canvasrt.export.body import BodySegment
from canvasrt.export.layers import Attention, Linear, attention_mask, gelu_gate, rotation
from canvasrt.export.moe import Experts
from canvasrt.export.quantize.stored_weights import WeightSource
from canvasrt.export.segments import SegmentModule


@dataclass
class Observed:
    """What has been recorded so far. `amax`: a weight's name → the largest magnitude of its inputs; `layers.<i>.key` or
    `layers.<i>.value` → the largest magnitude of a cached number. `routed`: layer → the number of tokens per expert."""

    amax: dict[str, Tensor] = field(default_factory=dict)
    routed: dict[int, Tensor] = field(default_factory=dict)

    def note(self, name: str, x: Tensor) -> None:
        """Record a tensor's largest magnitude. Once a tensor contains NaN, the record stays NaN."""
        least, most = torch.aminmax(x)
        largest = torch.maximum(-least, most)
        before = self.amax.get(name)
        self.amax[name] = largest if before is None else torch.maximum(before, largest)

    def check(self) -> None:
        """Raise CanvasError if a recorded magnitude is not finite."""
        values = torch.stack(list(self.amax.values()))
        if torch.isfinite(values).all():
            return
        broken = [name for name, value in self.amax.items() if not torch.isfinite(value)]
        raise CanvasError(
            f"the inputs of {', '.join(broken[:3])} overflowed during calibration",
            "the checkpoint is damaged, or a prompt contains tokens that it was not trained on",
        )


@dataclass
class CachedRow:
    """A request's keys and values, float32 `[1, kv_heads, n, head_dim]` per layer. `length` is the request's number of
    clean tokens, even if sliding layers keep fewer."""

    number: int
    caches: list[tuple[Tensor, Tensor]]
    length: int = 0


@dataclass
class Call:
    """The tokens of one request in a sweep. The first token is at position `start`. Every layer updates `hidden`
    `[1, L, D]`."""

    row: CachedRow
    start: int
    hidden: Tensor
    is_causal: bool  # clean tokens, not a canvas

    @property
    def length(self) -> int:
        return self.hidden.shape[1]


class ObservedPart:
    """A layer or the head. Its weights stay in memory until the next `load` into the same buffer."""

    def __init__(self, part: SegmentModule, observed: Observed) -> None:
        self.module: Any = part.module
        self._part = part
        prefix = f"layers.{part.layers[0]}." if part.layers else ""
        for name, module in part.module.named_modules():
            if isinstance(module, Linear):
                own = prefix + name.removeprefix("layers.0.")
                module.register_forward_pre_hook(partial(_note_input, observed, own))
        if isinstance(part.module, BodySegment):
            layer: Any = part.module.layers[0]
            layer.experts = _SortedExperts(layer.experts, part.layers[0], observed)
        else:
            norm: Any = part.module.norm
            norm.register_forward_hook(partial(_note_output, observed, TABLE))
        owners = {
            f"{name}.{own}".removeprefix("."): (module, own)
            for name, module in part.module.named_modules()
            for own in module._parameters
        }
        self._weights = {name: (*owner, getattr(*owner).shape) for name, owner in owners.items()}
        if isinstance(part.module, BodySegment):
            layer.attention = _RowsApart(part.module, part.layers[0], observed)

    def bytes(self, weights: WeightSource) -> int:
        """Return how many bytes the weights take in memory."""
        shapes = ((name, shape) for name, (_, _, shape) in self._weights.items())
        return sum(
            _padded(shape.numel() * self._dtype(name, weights).itemsize) for name, shape in shapes
        )

    def load(self, weights: WeightSource, room: Tensor, check: bool) -> None:
        """Read the weights into the buffer `room`. If `check` is true, raise CanvasError for a weight that is not
        finite."""
        begin = 0
        for name, (module, own, shape) in self._weights.items():
            dtype = self._dtype(name, weights)
            size = shape.numel() * dtype.itemsize
            place = room[begin : begin + size].view(dtype)
            begin += _padded(size)
            first = 0
            for piece in weights.read(self._part, name, check):
                # The assignment converts to float32, after the copy to the device.
                place[first : first + piece.numel()] = piece.reshape(-1).to(place.device)
                first += piece.numel()
            assert first == shape.numel(), name
            module._parameters[own] = nn.Parameter(place.view(shape), requires_grad=False)

    def _dtype(self, name: str, weights: WeightSource) -> torch.dtype:
        """Return a weight's dtype in memory: float32, except for experts, which are converted only when they run."""
        return weights.dtype if name.endswith((GATE_UP, DOWN)) else torch.float32


class _SortedExperts(nn.Module):
    """A layer's experts. They run one after another, each over the tokens that were routed to it."""

    def __init__(self, experts: Experts, layer: int, observed: Observed) -> None:
        super().__init__()
        self.gate_up, self.down = experts.gate_up, experts.down
        self._layer, self._observed, self._count = layer, observed, experts.experts

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, valid: Tensor, slots: None
    ) -> tuple[Tensor, None]:
        """Map `x` `[T, D]` to the weighted sum `[1, T, D]`; `index` and `weights` are `[T, top_k]`."""
        self._observed.note(f"layers.{self._layer}.{GATE_UP}", x)
        counts = torch.bincount(index.view(-1), minlength=self._count)
        routed = self._observed.routed
        routed[self._layer] = counts if self._layer not in routed else routed[self._layer] + counts
        order = index.view(-1).argsort(stable=True)
        mixed = torch.zeros_like(x)
        begin = 0
        for expert, count in enumerate(counts.tolist()):
            if not count:
                continue
            chosen = order[begin : begin + count]
            begin += count
            tokens = chosen // index.shape[1]
            inner = gelu_gate(x[tokens] @ self.gate_up[expert].to(x.dtype).t())
            self._observed.note(f"layers.{self._layer}.{DOWN}", inner)
            result = inner @ self.down[expert].to(x.dtype).t()
            mixed.index_add_(0, tokens, result * weights.view(-1)[chosen, None])
        return mixed[None], None


class _RowsApart(nn.Module):
    """Attention over the tokens of several calls, each of which has its own past."""

    def __init__(self, segment: BodySegment, index: int, observed: Observed) -> None:
        super().__init__()
        layer: Any = segment.layers[0]
        kind = segment.kinds[0]
        self._inner: Attention = layer.attention
        self._index, self._observed = index, observed
        self._window = segment.window if kind == "sliding" else None
        self._frequencies = segment.get_buffer(f"{kind}_frequencies")

    def forward(
        self, x: Tensor, calls: Sequence[Call], mask: None, key: None, value: None
    ) -> tuple[Tensor, None, None]:
        """Map `x` `[1, T, D]`, the concatenated tokens of `calls`, to the attention's output `[1, T, D]`."""
        parts = x.split([each.length for each in calls], 1)
        attended = [self._attend(part, call) for part, call in zip(parts, calls, strict=True)]
        return torch.cat(attended, 1), None, None

    def _attend(self, x: Tensor, call: Call) -> Tensor:
        keys, values = (each.to(x.device) for each in call.row.caches[self._index])
        known = torch.arange(call.start - keys.shape[2], call.start)[None]
        if not keys.shape[2]:  # attention needs a past, so give it one masked token
            keys, values = (
                each.new_zeros(*each.shape[:2], 1, each.shape[3]) for each in (keys, values)
            )
            known = torch.tensor([[-1]])
        positions = torch.arange(call.start, call.start + call.length)[None]
        apart, causal = torch.full_like(positions, -1), torch.tensor([call.is_causal])
        mask = attention_mask(positions, apart, causal, known, self._window, x.dtype)
        turn = rotation(positions, self._frequencies.to(x.device))
        out, key, value = self._inner(x, turn, mask, keys, values)
        if call.is_causal:
            self._observed.note(f"layers.{self._index}.key", key)
            self._observed.note(f"layers.{self._index}.value", value)
            call.row.caches[self._index] = (
                self._kept(keys, key, known),
                self._kept(values, value, known),
            )
        return out

    def _kept(self, past: Tensor, new: Tensor, known: Tensor) -> Tensor:
        """Join past and new keys or values. Leave out tokens to which no later token attends."""
        joined = torch.cat([past, new], 2)[:, :, int((known < 0).sum()) :]
        if self._window is not None:
            joined = joined[:, :, -(self._window - 1) :]
        return joined.cpu().contiguous()


def _note_input(observed: Observed, name: str, module: nn.Module, inputs: tuple[Tensor]) -> None:
    observed.note(name, inputs[0])


def _note_output(
    observed: Observed, name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> None:
    observed.note(name, output)


def _padded(size: int) -> int:
    """Round a size in bytes up, so that the next tensor is aligned."""
    return -(-size // 64) * 64
