"""Runs the kernels over sorted rows on this machine's GPU: checks their results against NumPy, and times them.

The input is one canvas for one layer of the released sizes with random weights, with even, skewed and padded routing.
Needs `canvasrt[rtx,sorted]`, but no checkpoint and no engine. The error is the largest deviation in the checked rows,
relative to the largest number in them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np

from bench import results
from canvasrt.checkpoints.released import released_model
from canvasrt.errors import UsageError
from canvasrt.formats import FORMATS, formats_of
from canvasrt.pass_shapes import BLOCK_ROWS
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.backends.sorted_engine import kernel_arguments
from canvasrt.runtime.engine import KernelCall
from canvasrt.sorted_rows import ahead, reference
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    GATE_UP_KERNEL,
    PROGRAM_OUTPUTS,
    ROUND,
    ROUNDED,
    SORT,
    STACK_PARTS,
    ExpertSizes,
    KernelForm,
)

PLAIN_DTYPE = "bfloat16"
INT4_BLOCK, NVFP4_BLOCK = (FORMATS[name].blocks[0] for name in ("int4", "nvfp4"))
CHECKED = 16  # rows
INNER_SCALE = 2.0**-7  # a power of two: dividing by it is exact


class Stack:
    """Random weights `[E, out, in]` of one matrix product, in the layout that its kernel reads."""

    def __init__(self, form: KernelForm, outputs: int, random: np.random.Generator) -> None:
        self.form = form
        self._shape = (form.sizes.experts, outputs, form.width)
        rows, size = self._shape[:2], form.width**-0.5
        # Placeholders: a kernel does not read parts that its format lacks.
        self.blocks = self.scales = np.zeros((form.sizes.experts, 0), np.float32)
        if form.format in ("int4", "nvfp4"):
            self.values = random.integers(0, 256, (*rows, form.width // 2), np.uint8)
        if form.format == "int4":
            blocks = random.random((*rows, form.width // INT4_BLOCK), np.float32) * 0.2 * size
            self.blocks = blocks.astype(ml_dtypes.bfloat16)
        elif form.format == "nvfp4":
            # These bytes are the E4M3 numbers from 1/8 to below 2.
            self.blocks = random.integers(32, 64, (*rows, form.width // NVFP4_BLOCK), np.uint8)
            self.scales = np.full(rows, 0.3 * INNER_SCALE * size, np.float32)
        elif form.format == "fp8":
            # 127 is the code of NaN.
            self.values = random.integers(0, 127, self._shape, np.uint8)
            self.values |= random.integers(0, 2, self._shape, np.uint8) << 7
            self.scales = np.full(rows, 0.01 * size, np.float32)
        else:
            wide = random.standard_normal(self._shape, np.float32) * size
            self.values = wide.astype(ml_dtypes.bfloat16)

    def matrix(self, expert: int) -> np.ndarray:
        """Return one expert's weights `[out, in]` in float32."""
        parts = (getattr(self, part)[expert].reshape(-1).view(np.uint8) for part in STACK_PARTS)
        return reference.matrix(self.form, *parts)


class LayerOnDevice:
    """One layer's experts on a device, with room for `tokens` tokens."""

    def __init__(
        self, device: Any, sizes: ExpertSizes, formats: tuple[str | None, str | None], tokens: int
    ) -> None:
        """`formats`: the formats of the weights of both products; None is bf16."""
        self.device, self.sizes, self.tokens = device, sizes, tokens
        self._formats = first, second = formats
        random = np.random.default_rng(0)
        blocks = [INT4_BLOCK if each == "int4" else None for each in formats]
        following = second if second in ROUNDED else None
        about = (sizes, PLAIN_DTYPE)
        gate_up = KernelForm(GATE_UP_KERNEL, *about, first, following, blocks[0])
        down = KernelForm(DOWN_KERNEL, *about, second, None, blocks[1])
        self.gate_up = Stack(gate_up, 2 * sizes.inner, random)
        self.down = Stack(down, sizes.size, random)
        x = random.standard_normal((tokens, sizes.size), np.float32)
        self.x = x.astype(ml_dtypes.float8_e4m3fn if first == "fp8" else ml_dtypes.bfloat16)
        self._at = {
            name: self._give(array)
            for name, array in {
                "x": self.x,
                "index": np.zeros((tokens, sizes.top_k), np.int32),
                "positions": np.arange(tokens, dtype=np.int64),
                **{
                    f"{each.form.function}.{part}": getattr(each, part)
                    for each in (self.gate_up, self.down)
                    for part in STACK_PARTS
                },
            }.items()
        }
        rows = sizes.blocks(tokens) * BLOCK_ROWS
        self._result = np.zeros((sizes.top_k, tokens, sizes.size), ml_dtypes.bfloat16)
        for name, size in {
            "order": 4 * sizes.experts * tokens,
            "counts": 4 * sizes.experts,
            "inner": 2 * rows * sizes.inner,
            "rounded": tokens * sizes.size,
            "rows": self._result.nbytes,
        }.items():
            self._at[name] = device.allocate(size)
        self._calls = list(self._plan())

    def route(self, index: np.ndarray) -> None:
        """Set the experts of each token, int32 `[T, K]`."""
        self._index = np.ascontiguousarray(index, np.int32)
        self.device.upload(self._at["index"], self._index)
        self.device.synchronize()

    def run(self) -> np.ndarray:
        """Run all kernels; return the resulting rows `[K, T, D]`."""
        for call in self._calls:
            self.device.run_kernel(call)
        self.device.download(self._result, self._at["rows"])
        self.device.synchronize()
        return self._result.astype(np.float32)

    def seconds(self, repeats: int) -> list[float]:
        """Return the median seconds of each kernel."""
        marks = []
        for _ in range(2 + repeats):
            for call in self._calls:
                begin = self.device.clock()
                self.device.run_kernel(call)
                marks.append((begin, self.device.clock()))
        self.device.synchronize()
        took = [self.device.elapsed(*pair) for pair in marks]
        count = len(self._calls)
        return [statistics.median(took[place::count][2:]) for place in range(count)]

    def error(self, random: np.random.Generator) -> float:
        """Return the largest deviation of some random rows, relative to the largest number in a row."""
        found, errors = self.run(), []
        for token in random.choice(self.tokens, min(CHECKED, self.tokens), replace=False):
            choice = int(random.integers(self.sizes.top_k))
            wanted = self._row(token, int(self._index[token, choice]))
            errors.append(np.abs(found[choice, token] - wanted).max() / np.abs(wanted).max())
        return float(np.max(errors))  # NaN if any error is NaN

    def _row(self, token: int, expert: int) -> np.ndarray:
        x, form = self.x[token : token + 1].astype(np.float32), self.gate_up.form
        x = reference.rounded(x, form, INNER_SCALE) if form.format == "nvfp4" else x
        gate_up, down = self.gate_up.matrix(expert), self.down.matrix(expert)
        return reference.results(x, gate_up, down, self.down.form, INNER_SCALE)[0]

    def _plan(self) -> Iterator[KernelCall]:
        sizes, at = self.sizes, self._at
        rows = [at["order"], at["counts"]]
        sort = KernelForm(SORT, sizes, PLAIN_DTYPE)
        yield self._call(sort, (sizes.experts, 1, 1), [at["index"], at["positions"], *rows])
        taken = "x"
        if self._formats[0] == "nvfp4":
            rounding, taken = KernelForm(ROUND, sizes, PLAIN_DTYPE), "rounded"
            grid = (-(-self.tokens // BLOCK_ROWS), -(-sizes.size // PROGRAM_OUTPUTS), 1)
            yield self._call(rounding, grid, [at["x"], at[taken]], INNER_SCALE)
        for stack, source, to, scale in (
            (self.gate_up, taken, "inner", INNER_SCALE),
            (self.down, "inner", "rows", 1.0),
        ):
            name = stack.form.function
            parts = [at[f"{name}.{part}"] for part in STACK_PARTS]
            grid = (sizes.blocks(self.tokens), -(-stack.form.outputs // PROGRAM_OUTPUTS), 1)
            yield self._call(stack.form, grid, [at[source], *parts, *rows, at[to]], scale)

    def _call(
        self, form: KernelForm, grid: tuple[int, int, int], pointers: list[int], *scale: float
    ) -> KernelCall:
        made = ahead.compile_kernel(form, self.device.capability)
        kernel = self.device.load_kernel(made.image, made.entry, made.shared)
        given = kernel_arguments(pointers, self.tokens, *scale)
        return KernelCall(kernel, grid, made.threads, made.shared, given)

    def _give(self, array: np.ndarray) -> int:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.device.allocate(max(1, flat.nbytes))
        self.device.upload(address, flat)
        self.device.synchronize()
        return address


def routings(sizes: ExpertSizes, tokens: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the experts of each token by routing: even; skewed, where the odds of experts are log-normal; and padded,
    where half of all tokens have the same experts."""
    random = np.random.default_rng(1)
    likely = random.standard_normal(sizes.experts)
    for name, scores in (("even", 0 * likely), ("skewed", likely), ("padded", 0 * likely)):
        drawn = scores + random.gumbel(size=(tokens, sizes.experts))
        index = np.argsort(-drawn)[:, : sizes.top_k]
        if name == "padded":
            index[tokens // 2 :] = index[0]
        yield name, index


def measure(
    format: Literal["nvfp4", "int4", "fp8", "bf16"] = "int4",
    tokens: int = released_model().canvas_length,
    repeats: int = 20,
    out: results.Out = None,
) -> None:
    """Measure the kernels of one layer's experts, in microseconds."""
    model, device = released_model(), CudaDevice("rtx")
    sizes = ExpertSizes(
        model.num_experts, model.top_k_experts, model.hidden_size, model.moe_intermediate_size
    )
    chosen = None if format == "bf16" else format
    if chosen and chosen not in formats_of(device.capability):
        able = ", ".join(["bf16", *formats_of(device.capability)])
        raise UsageError(f"--format {format}: {device.name} does not multiply it", f"give {able}")
    layer = LayerOnDevice(device, sizes, (chosen, chosen), tokens)
    kernels = ["sort", *(["round"] if format == "nvfp4" else []), "gate and up", "down"]
    rows = []
    for name, index in routings(sizes, tokens):
        layer.route(index)
        error = layer.error(np.random.default_rng(2))
        took = zip(kernels, layer.seconds(repeats), strict=True)
        rows.append({"routing": name} | {k: 1e6 * s for k, s in took} | {"error": error})
    figures = {"device": device.name, "format": format, "tokens": tokens, "microseconds": rows}
    results.report(figures, out)
