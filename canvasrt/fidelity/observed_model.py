"""Observes values inside a bundle's graphs: copies in memory get additional inputs and outputs.

This works only with ONNX Runtime, because TensorRT engines do not expose internal values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.defaults import GEOMETRY
from canvasrt.extras import require
from canvasrt.runtime.backends.onnxruntime import OrtBackend, OrtSegment
from canvasrt.runtime.bundle_facts import pass_work
from canvasrt.runtime.engine import Arrays
from canvasrt.runtime.open import open_model

if TYPE_CHECKING:
    import onnx_ir as ir

LOGITS = "logits"


class ObservingBackend(OrtBackend):
    """ONNX Runtime with two additions: the head also outputs logits, and `segments` contains every segment.

    streamed: keep only the running segment in memory.
    """

    def __init__(self, work: int, streamed: bool = False) -> None:
        super().__init__(None, work)
        self.segments: dict[str, Any] = {}
        self._streamed = streamed
        self._current: OnDemand | None = None

    def open(self, name: str, file: Path) -> Any:
        opened: Any
        model = _load(file)
        if name == "head":
            opened = ObservedHead(self.open_graph(name, with_logits(model), file.parent))
        elif self._streamed and name != GEOMETRY:
            opened = self.open_graph(name, model, file.parent)
        else:
            opened = super().open(name, file)
        self.segments[name] = opened
        return opened

    def open_graph(self, name: str, model: ir.Model, folder: Path) -> Any:
        """Open a graph that is in memory. The graph's weights are in files in `folder`."""
        from onnx_ir import to_proto

        graph = to_proto(model).SerializeToString()
        if not self._streamed:
            return self.open_bytes(name, graph, folder)
        inputs = frozenset(str(each.name) for each in model.graph.inputs)
        outputs = tuple(str(each.name) for each in model.graph.outputs)
        return OnDemand(
            name,
            inputs,
            outputs,
            partial(self._take, partial(self.open_bytes, name, graph, folder)),
        )

    def _take(self, open_it: Callable[[], OrtSegment], segment: OnDemand) -> OrtSegment:
        """Close the open segment, if there is one, and open `segment`."""
        if self._current is not None:
            self._current.close()
        self._current = segment
        return open_it()


class OnDemand:
    """A segment that is opened when it runs, and stays open until another one runs."""

    def __init__(
        self,
        name: str,
        inputs: frozenset[str],
        outputs: tuple[str, ...],
        take: Callable[[OnDemand], OrtSegment],
    ) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self._take = take
        self._opened: OrtSegment | None = None

    def close(self) -> None:
        """Close the segment if it is open."""
        self._opened = None

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        if self._opened is None:
            self._opened = self._take(self)
        return self._opened.run(feeds, wanted)


class ObservedHead:
    """The head, which records the logits of every run while `watch` is true. It keeps only the latest logits."""

    def __init__(self, segment: OrtSegment | OnDemand) -> None:
        self._segment = segment
        self.name, self.inputs = segment.name, segment.inputs
        self.outputs = tuple(name for name in segment.outputs if name != LOGITS)
        self.watch = False
        self.logits = np.empty(0, np.float32)  # [B, L, V], soft-capped, before the temperature

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        names = list(self.outputs if wanted is None else wanted)
        out = self._segment.run(feeds, [*names, LOGITS] if self.watch else names)
        self.logits = out.pop(LOGITS, self.logits)
        return out


class ObservedModel:
    """A bundle as users run it. If ONNX Runtime runs it, logits and segments can be observed."""

    def __init__(self, bundle: Bundle, streamed: bool = False) -> None:
        self.bundle = bundle
        self.backend: ObservingBackend | None = None
        self.head: ObservedHead | None = None
        if (bundle.manifest.target or {}).get("backend", "onnxruntime") == "onnxruntime":
            require("onnx_ir", "export")
            self.backend = ObservingBackend(pass_work(bundle.manifest.model), streamed)
        self.model = open_model(bundle.path, check=False, backend=self.backend)
        if self.backend is not None:
            self.head = self.backend.segments["head"]

    @contextlib.contextmanager
    def watching(self) -> Iterator[ObservedHead | None]:
        """Yield the head, which keeps the logits of passes inside the block; None if engines hide the logits."""
        if self.head is not None:
            self.head.watch = True
        yield self.head
        if self.head is not None:
            self.head.watch = False

    def layers(self, segment: Mapping[str, Any]) -> OrtSegment | OnDemand:
        """Open a body segment that is cut at every layer; see `cut_layers`."""
        assert self.backend is not None
        file = self.bundle.file(segment["file"])
        model = cut_layers(_load(file), len(segment["layers"]))
        return self.backend.open_graph(segment["name"], model, file.parent)


def with_logits(model: ir.Model) -> ir.Model:
    """Add the logits to a head's outputs, and return the head. The logits are the value that its sampler divides by the
    temperature. A shortened sampler multiplies a value by cap / temperature instead; the logits are then this value
    times the cap."""
    import onnx_ir as ir

    divisions = [node for node in model.graph if node.op_type == "Div"]
    (divided,) = (node for node in divisions if _source(node.inputs[1]) == "temperature")
    factor = [node for node, place in divided.outputs[0].uses() if place]
    if factor and factor[0].op_type == "Mul":
        logits = ir.node("Mul", [factor[0].inputs[0], divided.inputs[0]])
    else:
        logits = ir.node("Identity", [divided.inputs[0]])
    _add_output(model.graph, logits, LOGITS, ["batch", "length", "vocabulary"])
    return model


def _source(value: ir.Value | None) -> str | None:
    """Return the name of the graph input from which a value was reshaped; the value's own name if it is an input."""
    while value is not None and (node := value.producer()) is not None and node.inputs:
        value = node.inputs[0]
    return value.name if value is not None else None


def cut_layers(model: ir.Model, count: int) -> ir.Model:
    """Return a body segment of `count` layers, cut at every layer.

    Layers k > 0 read an input `hidden_k`, and all layers but the last write an output `hidden_out_k`. So one run
    computes every layer, each on a separate input.
    """
    import onnx_ir as ir

    graph = model.graph
    (hidden,) = (value for value in graph.inputs if value.name == "hidden")
    assert hidden.shape is not None
    shape = ["batch", "length", hidden.shape[2]]
    for k in range(1, count):
        norm = graph.initializers[f"layers.{k}.input_norm.weight"]
        (border,) = next(node.inputs[:1] for node in graph if norm in node.inputs)
        assert border is not None
        given = ir.Value(
            name=f"hidden_{k}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape)
        )
        border.replace_all_uses_with(given)
        graph.inputs.append(given)
        _add_output(graph, ir.node("Identity", [border]), f"hidden_out_{k - 1}", shape)
    return model


def _add_output(graph: ir.Graph, node: ir.Node, name: str, shape: Sequence[Any]) -> None:
    """Append a node, and make its result an output. The rest of the graph does not change."""
    import onnx_ir as ir

    (value,) = node.outputs
    value.name, value.type = name, ir.TensorType(ir.DataType.FLOAT)
    value.shape = ir.Shape(shape)
    graph.append(node)
    graph.outputs.append(value)


def _load(file: Path) -> ir.Model:
    import onnx_ir as ir

    return ir.load(file)
