"""Observes values inside a bundle's graphs, by edited copies in memory with additional inputs and outputs.

Only works with ONNX Runtime, because TensorRT engines do not expose internal values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.defaults import GEOMETRY
from canvasrt.extras import require
from canvasrt.runtime.backends.onnxruntime import OrtBackend, OrtSegment
from canvasrt.runtime.engine import Arrays
from canvasrt.runtime.open import open_model
from canvasrt.runtime.tables import pass_work

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

LOGITS = "logits"


class ObservingBackend(OrtBackend):
    """ONNX Runtime with the head's logits as an extra output, and access to every segment.

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

    def open_graph(self, name: str, model: ModelProto, folder: Path) -> Any:
        """Open a graph from memory. Its weights are files in `folder`."""
        graph = model.SerializeToString()
        if not self._streamed:
            return self.open_bytes(name, graph, folder)
        stored = {each.name for each in model.graph.initializer}
        inputs = frozenset(each.name for each in model.graph.input) - stored
        outputs = tuple(each.name for each in model.graph.output)
        return OnDemand(
            name,
            inputs,
            outputs,
            partial(self._take, partial(self.open_bytes, name, graph, folder)),
        )

    def _take(self, open_it: Callable[[], OrtSegment], segment: OnDemand) -> OrtSegment:
        """Close the open segment, and open another one."""
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
        """Close the open segment."""
        self._opened = None

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        if self._opened is None:
            self._opened = self._take(self)
        return self._opened.run(feeds, wanted)


class ObservedHead:
    """The head. It keeps the logits of its last run while `watch` is set."""

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
            require("onnx", "export")
            self.backend = ObservingBackend(pass_work(bundle.manifest.model), streamed)
        self.model = open_model(bundle.path, check=False, backend=self.backend)
        if self.backend is not None:
            self.head = self.backend.segments["head"]

    @contextlib.contextmanager
    def watching(self) -> Iterator[ObservedHead | None]:
        """Yield the head, which keeps the logits of passes inside the block; None if they are not visible."""
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


def with_logits(model: ModelProto) -> ModelProto:
    """Return a head with the logits as an additional output. These are the operand of the division by the temperature,
    or in a shortened sampler, the operand of the multiplication by cap / temperature, times the cap."""
    from onnx import TensorProto, helper

    divisions = [node for node in model.graph.node if node.op_type == "Div"]
    (divided,) = (
        node for node in divisions if _comes_from(model.graph, node.input[1], "temperature")
    )
    factor = [node for node in model.graph.node if divided.output[0] in node.input[1:]]
    if factor and factor[0].op_type == "Mul":
        both = [factor[0].input[0], divided.input[0]]
        model.graph.node.append(helper.make_node("Mul", both, [LOGITS], LOGITS))
    else:
        _name_output(model.graph, divided.input[0], LOGITS)
    shape = ["batch", "length", "vocabulary"]
    model.graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, shape))
    return model


def _comes_from(graph: GraphProto, value: str, name: str) -> bool:
    """Return whether a value is the graph's input, possibly reshaped."""
    producers = {output: node for node in graph.node if node.input for output in node.output}
    while value in producers:
        value = producers[value].input[0]
    return value == name


def cut_layers(model: ModelProto, count: int) -> ModelProto:
    """Return a body segment of `count` layers, cut at every layer.

    Layers k > 0 read an input `hidden_k`, and all but the last write an output `hidden_out_k`. So one run computes
    every layer on a given input.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    shape = ["batch", "length", next(each for each in graph.input if each.name == "hidden")]
    width = shape.pop().type.tensor_type.shape.dim[2].dim_value
    for k in range(1, count):
        norm = f"layers.{k}.input_norm.weight"
        border = next(node.input[0] for node in graph.node if norm in node.input)
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name == border:
                    node.input[place] = f"hidden_{k}"
        _name_output(graph, border, f"hidden_out_{k - 1}")
        for values, name in ((graph.input, f"hidden_{k}"), (graph.output, f"hidden_out_{k - 1}")):
            values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [*shape, width]))
    return model


def _name_output(graph: GraphProto, value: str, name: str) -> None:
    """Make a value an output through a copy, so that nothing else in the graph changes."""
    from onnx import helper

    graph.node.append(helper.make_node("Identity", [value], [name], f"{name}_observed"))


def _load(file: Path) -> ModelProto:
    import onnx

    return onnx.load(file, load_external_data=False)
