"""Describes a segment that is cut into pieces: its engines, its experts' weights, and the kernels between the engines.

The segment's file is JSON; see `SortedSegment`. It names the other files, which are in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.graphs.names import CARRIED, EXPERT_INDEX, EXPERT_INPUT, EXPERT_ROWS, SHARES
from canvasrt.pass_shapes import BLOCK_ROWS

SORTED_SUFFIX = ".sorted.json"
# How many outputs of a product one program computes. A program is one block of a kernel's threads.
PROGRAM_OUTPUTS = 64
# Weight format → the number that selects it in kernels. None means unquantized weights, in the activations' dtype.
FORMS = {None: 0, "int4": 1, "fp8": 2, "nvfp4": 3}
# Formats whose products take quantized rows.
ROUNDED = ("fp8", "nvfp4")
# Buffers between kernels: the experts' lists of rows, the lengths of these lists, and the experts' inner states.
ORDER, COUNTS, INNER = "order", "counts", "inner"
SORT, ROUND, GATE_UP_KERNEL, DOWN_KERNEL = "sort_rows", "round_rows", "gate_up", "down"


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a model: their number, experts per token, and outer and inner width."""

    experts: int
    top_k: int
    size: int
    inner: int

    @classmethod
    def of(cls, model: ModelConfig) -> ExpertSizes:
        """Return the sizes of a model's experts."""
        return cls(
            model.num_experts, model.top_k_experts, model.hidden_size, model.moe_intermediate_size
        )

    def blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that the rows of `tokens` tokens occupy, fully or partly."""
        rows = tokens * self.top_k
        return rows // BLOCK_ROWS + min(self.experts, rows)

    def buffers(self, tokens: int, item: int) -> dict[str, int]:
        """Return the size in bytes of each buffer between pieces, for `tokens` tokens and `item` bytes per activation.

        The tokens' NVFP4 codes share the buffer of the experts' result, which is written later.
        """
        states, choices = tokens * self.size * item, tokens * self.top_k
        kept = dict.fromkeys(CARRIED, states) | {SHARES: 4 * choices}
        return {
            **{f"{name}.{turn}": size for name, size in kept.items() for turn in (0, 1)},
            EXPERT_INPUT: states,
            EXPERT_INDEX: 4 * choices,
            EXPERT_ROWS: self.top_k * states,
            ORDER: 4 * self.experts * tokens,
            COUNTS: 4 * self.experts,
            INNER: self.blocks(tokens) * BLOCK_ROWS * self.inner * item,
        }


@dataclass(frozen=True)
class KernelForm:
    """One kernel to compile.

    Attributes:
        function: the kernel's name in `triton_kernels`.
        sizes: the experts' sizes.
        dtype: NumPy's name for the activations' dtype outside the experts.
        format: the weights' number format; None for unquantized weights, in the activations' dtype.
        following: the format of the weights in the next product, whose inputs this kernel writes.
        block: how many inputs share a scale in INT4; None in all other formats.
    """

    function: str
    sizes: ExpertSizes
    dtype: str
    format: str | None = None
    following: str | None = None
    block: int | None = None

    @classmethod
    def named(cls, name: str, sizes: ExpertSizes, dtype: str) -> KernelForm:
        """Return the form that has this `name`."""
        function, format, *rest = name.split("-")
        about = dict(zip(rest[::2], rest[1::2], strict=True))
        block = int(about["blocks"]) if "blocks" in about else None
        return cls(
            function, sizes, dtype, None if format == dtype else format, about.get("to"), block
        )

    @property
    def name(self) -> str:
        """The name of this description in a segment's file. The kernel's file has the same name."""
        about = [self.format or self.dtype, self.following and f"to-{self.following}"]
        blocks = f"blocks-{self.block}" if self.block else None
        return "-".join([self.function, *(each for each in (*about, blocks) if each)])

    @property
    def width(self) -> int:
        """Number of inputs of the product."""
        return self.sizes.inner if self.function == DOWN_KERNEL else self.sizes.size

    @property
    def outputs(self) -> int:
        """Number of outputs of the product; a gate and the value that it multiplies count as one."""
        return self.sizes.size if self.function == DOWN_KERNEL else self.sizes.inner


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel: its file, its name in the file, size of shared memory in bytes, and threads per program."""

    file: str
    entry: str
    shared: int
    threads: int


@dataclass(frozen=True)
class ExpertStack:
    """One of a layer's two stacks of expert matrices: the kernel that multiplies by it, and the location of its parts
    in the weights' file.

    The parts are values (numbers or codes), blocks (scales of input blocks) and scales (scales of outputs). Each is an
    offset and a size in bytes, which are both 0 for a part that the format lacks.
    """

    kernel: str
    values: tuple[int, int]
    blocks: tuple[int, int] = (0, 0)
    scales: tuple[int, int] = (0, 0)


# A stack's parts, in the order in which a kernel takes them.
STACK_PARTS = ("values", "blocks", "scales")


@dataclass(frozen=True)
class SortedLayer:
    """One layer's experts.

    Attributes:
        rounding: the kernel that quantizes the first product's inputs; None if they need no kernel.
        input_scale, inner_scale: the scale of the first and second product's inputs; 1 if they are not quantized.
    """

    gate_up: ExpertStack
    down: ExpertStack
    rounding: str | None = None
    input_scale: float = 1.0
    inner_scale: float = 1.0


@dataclass(frozen=True)
class SortedSegment:
    """A body segment as pieces, between which kernels compute the experts.

    Attributes:
        pieces: file and SHA-256 of each piece's engine. There is one more piece than there are layers.
        weights: the file of all layers' stacks, in order.
        kernels: images by kernel name and compute capability, such as `8.9`.
        tile: the numbers of rows and outputs per program for which kernels were compiled.
    """

    sizes: ExpertSizes
    dtype: str
    pieces: tuple[tuple[str, str], ...]
    weights: str
    layers: tuple[SortedLayer, ...]
    kernels: Mapping[str, Mapping[str, KernelImage]]
    tile: tuple[int, int] = (BLOCK_ROWS, PROGRAM_OUTPUTS)

    def write(self, file: Path) -> None:
        """Write the segment's file."""
        file.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> SortedSegment:
        """Read a segment's file. Raises CanvasError if this version's `write` did not write it."""
        try:
            return cls._from_json(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CanvasError(
                f"{file} cannot be read as a segment of sorted rows: {error}",
                "remove the bundle, and build it again with this version",
            ) from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> SortedSegment:
        layers = (
            SortedLayer(**each | {name: _stack(each[name]) for name in ("gate_up", "down")})
            for each in data["layers"]
        )
        kernels = {
            name: {capability: KernelImage(**image) for capability, image in images.items()}
            for name, images in data["kernels"].items()
        }
        if (tile := tuple(data["tile"])) != (BLOCK_ROWS, PROGRAM_OUTPUTS):
            raise ValueError(f"its kernels have tiles of {tile}")
        sizes, pieces = ExpertSizes(**data["sizes"]), tuple((n, h) for n, h in data["pieces"])
        return cls(sizes, data["dtype"], pieces, data["weights"], tuple(layers), kernels)


def _stack(data: dict[str, Any]) -> ExpertStack:
    parts = ((int(begin), int(size)) for begin, size in (data[name] for name in STACK_PARTS))
    return ExpertStack(data["kernel"], *parts)


def layer_kernels(gate_up: KernelForm, down: KernelForm) -> list[KernelForm]:
    """Return all kernels of the layer that has these two products, in the order in which they run."""
    first = [KernelForm(SORT, gate_up.sizes, gate_up.dtype)]
    if gate_up.format == "nvfp4":
        first.append(KernelForm(ROUND, gate_up.sizes, gate_up.dtype))
    return [*first, gate_up, down]


def inputs_per_step(form: KernelForm) -> int:
    """Return how many inputs a product takes per step. INT4 stores a step's first half in the low bits of bytes.

    Raises CanvasError for a format that no kernel multiplies, and for INT4 rows or blocks that cannot be divided into
    steps.
    """
    if form.format not in FORMS:
        raise CanvasError(
            f"sorted rows do not support experts in {form.format}", "build with --experts slots"
        )
    if form.format in ROUNDED:
        return 64 if form.width % 128 else 128
    if form.format is None:
        return 64
    block = form.block or form.width
    for step in (64, 32):
        if form.width % step == 0 and block % (step // 2) == 0:
            return step
    raise CanvasError(
        f"sorted rows do not support INT4 experts with {form.width} inputs in blocks of {block}",
        "build with --experts slots",
    )
