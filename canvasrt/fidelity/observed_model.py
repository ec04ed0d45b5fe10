"""Observes values inside a bundle's graphs: copies in memory get additional inputs and outputs.

This works only with ONNX Runtime, because TensorRT engines do not expose internal values.
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
from canvasrt.graphs.names import LOGITS
from canvasrt.runtime.backends.onnxruntime import OrtBackend, OrtSegment
from canvasrt.runtime.bundle_facts import pass_work
from canvasrt.runtime.engine import Arrays
from canvasrt.runtime.open import open_model

if TYPE_CHECKING:
    import onnx_ir as ir


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
        import onnx_ir as ir

        from canvasrt.graphs.observed import with_logits

        opened: Any
        model = ir.load(file)
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
        import onnx_ir as ir

        from canvasrt.graphs.observed import cut_layers

        assert self.backend is not None
        file = self.bundle.file(segment["file"])
        model = cut_layers(ir.load(file), len(segment["layers"]))
        return self.backend.open_graph(segment["name"], model, file.parent)
