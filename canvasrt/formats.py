"""The number formats that weights are quantized to, in one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Codes:
    """An encoding of numbers in few bits: as small floats, or as integers in two's complement. Decoding and rounding
    are derived from the fields.

    Attributes:
        onnx: ONNX's name of the dtype.
        bits: bits per number.
        mantissa: bits of the mantissa; None for integers.
        largest: the largest magnitude in use.
        builder: TensorRT's name of the dtype in a list of kernels.
        rates: names of the GPU rates for products of these numbers: the format's own rate, then the rates of wider
            formats, for GPUs without the format's own. Empty if numbers are converted to 16 bits before products.
        has_nan: whether the code with all bits set is NaN.
    """

    onnx: str
    bits: int
    mantissa: int | None
    largest: float
    builder: str
    rates: tuple[str, ...] = ()
    has_nan: bool = False


E2M1 = Codes("FLOAT4E2M1", 4, 1, 6.0, "FP4E2M1", ("fp4", "fp8"))
E4M3 = Codes("FLOAT8E4M3FN", 8, 3, 448.0, "FP8", ("fp8",), has_nan=True)
INT4 = Codes("INT4", 4, None, 7.0, "Int4")
INT8 = Codes("INT8", 8, None, 127.0, "Int8", ("int8",))
ALL_CODES = {each.onnx: each for each in (E2M1, E4M3, INT4, INT8)}


@dataclass(frozen=True)
class Compressed:
    """compressed-tensors' names for a format: the type and its bits, the possible layouts, and the possible strategies.
    A strategy says which parts of a weight have their own scale."""

    kind: str
    layouts: tuple[str, ...]
    strategies: tuple[str, ...]


@dataclass(frozen=True)
class NumberFormat:
    """One format.

    Attributes:
        codes: the encoding of a number.
        capability: the lowest compute capability that can multiply the format.
        weight_error: the relative error that the quality report allows a matrix. Rounding alone causes less; a scale
            that is 10% off causes more. (Other checks may miss a wrong scale, because norms hide its effect.)
        blocks: possible lengths of the blocks of inputs that share a scale; the first that fits a row is used. Empty:
            one scale per matrix or per output.
        least_blocks: the fewest blocks per row; shorter blocks are used if a row would have fewer.
        block_scales: the encoding of the blocks' scales, which another scale per matrix multiplies. None: the blocks'
            scales are 16-bit floats, and there is no other scale.
        input_quantizer: TensorRT's operator that quantizes inputs block by block. None: ONNX's `QuantizeLinear`, with
            one calibrated scale.
        of_table: whether the format is for the embedding table, and not for the weights of products.
        projects: whether the two products with the embedding table can use the format. Rows are then looked up in a
            second, 16-bit table.
        engine_copies: how many copies of a weight an engine has: TensorRT keeps one for each way to multiply by it.
        builder_factor: how many bytes a TensorRT builder needs per byte of weights in the format, including the mapped
            file.
        feeds_all_tokens: whether every expert's first product takes all tokens of a single canvas, not only those in
            the expert's slots. Reading the weights takes most of the time either way. If all tokens are taken, each
            token is quantized once instead of once per slot.
        rounds_inputs: whether the products' inputs are quantized too, with a calibrated scale.
        packed_on_cpu: whether a CPU multiplies packed weights; weights in all other formats become float32 there.
        caches: whether keys and values can be cached in the format.
        modelopt, compressed: how ModelOpt's and compressed-tensors' checkpoints name the format; None if they lack it.
    """

    name: str
    codes: Codes
    capability: tuple[int, int]
    weight_error: float
    blocks: tuple[int, ...] = ()
    least_blocks: int = 1
    block_scales: Codes | None = None
    input_quantizer: str | None = None
    of_table: bool = False
    projects: bool = False
    engine_copies: int = 1
    builder_factor: float = 2.6
    feeds_all_tokens: bool = False
    rounds_inputs: bool = True
    packed_on_cpu: bool = False
    caches: bool = False
    modelopt: str | None = None
    compressed: Compressed | None = None

    def quantizes(self, table: bool) -> bool:
        """Return whether the format can quantize the embedding table or, if `table` is false, all other weights."""
        return self.of_table or self.projects if table else not self.of_table

    @property
    def bits(self) -> int:
        """Bits per number."""
        return self.codes.bits

    @property
    def largest(self) -> float:
        """The largest magnitude at scale 1: the largest code, times the largest block scale if block scales are
        encoded, too."""
        return self.codes.largest * (self.block_scales.largest if self.block_scales else 1)

    @property
    def scale_bits(self) -> int:
        """Bits per block scale; 0 without blocks."""
        if not self.blocks:
            return 0
        return self.block_scales.bits if self.block_scales else 16

    def block(self, width: int) -> int | None:
        """Return the block length for rows of `width`; None if no length divides them into at least `least_blocks`
        blocks, or if the format has no blocks."""
        fitting = (each for each in self.blocks if width % each == 0)
        return next((each for each in fitting if width // each >= self.least_blocks), None)

    def divides(self, width: int) -> bool:
        """Return whether rows of `width` can be quantized to this format."""
        return not self.blocks or self.block(width) is not None

    def weight_bytes(self, width: int) -> float:
        """Return bytes per number in rows of `width`, including block scales."""
        block = self.block(width)
        return (self.bits + (self.scale_bits / block if block else 0)) / 8

    def cpu_bytes(self, width: int, in_file: bool = False) -> float:
        """Return bytes per number on a CPU. Packed formats need codes and float32 scales, and in memory also a float32
        sum per block. All other formats become float32."""
        if not self.packed_on_cpu:
            return 4.0
        return self.bits / 8 + (4 if in_file else 8) / (self.block(width) or width)

    def scale(self, amax: float) -> float:
        """Return the scale at which the largest code represents `amax`. If calibration recorded only zeros, any scale
        works, and 1 is returned."""
        return (amax or self.largest) / self.largest

    @property
    def blocks_text(self) -> str:
        """Text about the blocks: `blocks of 16`."""
        *others, last = map(str, self.blocks)
        return f"blocks of {', '.join(others)} or {last}" if others else f"blocks of {last}"


# All formats. If a GPU supports several, the first of them is preferred.
_TABLE = (
    # Two E2M1 numbers per byte, an E4M3 scale per block, and a float32 scale that multiplies the blocks' scales.
    NumberFormat(
        name="nvfp4",
        codes=E2M1,
        capability=(10, 0),
        weight_error=0.13,
        blocks=(16,),
        block_scales=E4M3,
        input_quantizer="TRT_FP4DynamicQuantize",
        builder_factor=2.3,
        feeds_all_tokens=True,
        modelopt="NVFP4",
    ),
    # E4M3.
    NumberFormat(
        name="fp8",
        codes=E4M3,
        capability=(8, 9),
        weight_error=0.05,
        projects=True,
        builder_factor=2.0,  # the mapped file, and a copy
        caches=True,
        modelopt="FP8",
        compressed=Compressed(
            "float8", ("float-quantized", "naive-quantized"), ("tensor", "channel")
        ),
    ),
    # −8 … 7 in two's complement, with bfloat16 scales. Only weights are quantized; products run in 16 bits.
    NumberFormat(
        name="int4",
        codes=INT4,
        capability=(8, 0),
        weight_error=0.13,
        blocks=(64, 32, 16),
        least_blocks=2,  # with a single scale per row, TensorRT widens the weight before the product
        builder_factor=4.3,  # the builder transposes the weight, and keeps both forms
        rounds_inputs=False,
        packed_on_cpu=True,
        compressed=Compressed("int4", ("pack-quantized",), ("group", "channel")),
    ),
    # −127 … 127, times a bfloat16 scale per token. This is for the embedding table, which the final projection, the
    # soft embedding and the host read.
    NumberFormat(
        name="int8",
        codes=INT8,
        capability=(8, 0),
        weight_error=0.03,
        of_table=True,
        engine_copies=2,
        builder_factor=3.2,
        rounds_inputs=False,
        packed_on_cpu=True,
    ),
)
FORMATS = {each.name: each for each in _TABLE}
_BY_CODES = {each.codes: each for each in _TABLE if each.rounds_inputs and not each.blocks}
_BY_QUANTIZER = {each.input_quantizer: each for each in _TABLE if each.input_quantizer}
# The precisions of exported graphs: fp32 for a CPU, bf16 for GPUs.
PLAIN = ("fp32", "bf16")


def rounding_format(operator: str, dtype: str | None = None) -> NumberFormat | None:
    """Return the format that an operator of a graph quantizes activations or a cache to; None for other operators.

    dtype: ONNX's name of the dtype that `QuantizeLinear` writes.
    """
    if operator == "QuantizeLinear" and dtype in ALL_CODES:
        return _BY_CODES.get(ALL_CODES[dtype])
    return _BY_QUANTIZER.get(operator)


def formats_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the formats in which a GPU of this compute capability can multiply."""
    return tuple(
        each.name for each in _TABLE if capability >= each.capability and not each.of_table
    )


def most_demanding(names: set[str]) -> str:
    """Return the name of the format that needs the newest GPU. In a tie, it is the format with the fewest bits."""
    return max(names, key=lambda name: (FORMATS[name].capability, -FORMATS[name].bits))


def weight_limits() -> dict[str | None, float]:
    """Return format → the largest accepted relative error of a matrix. The key None is for unquantized matrices."""
    return {None: 0.005, **{name: each.weight_error for name, each in FORMATS.items()}}
