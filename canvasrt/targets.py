"""The table of targets: machines for which engines are built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from canvasrt.errors import UsageError
from canvasrt.formats import formats_of

BuilderName = Literal["onnxruntime", "tensorrt-rtx", "tensorrt"]
GB = 10**9


@dataclass(frozen=True)
class Target:
    """One row of the target table.

    Attributes:
        capability: the GPU's compute capability; None for a CPU.
        memory: the GPU's memory in bytes; None if it depends on the host.
        precision: the default of `--precision`.
        recipe: the default recipe for the precision; None means the recipe that has the precision's name.
        newer: further compute capabilities on which the same engines run.
    """

    name: str
    gpu: str
    memory: int | None
    capability: tuple[int, int] | None
    builder: BuilderName
    precision: str
    host: str = "x86_64"
    newer: tuple[tuple[int, int], ...] = ()
    recipe: str | None = None

    @property
    def unified(self) -> bool:
        """Whether the GPU shares the host's memory. NVIDIA's tools then report no GPU memory."""
        return "unified" in self.gpu

    @property
    def default(self) -> str:
        """The default of `--precision`."""
        return self.recipe or self.precision

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """The capabilities on which the engines run, oldest first; empty for a CPU."""
        return (self.capability, *self.newer) if self.capability else ()

    @property
    def precisions(self) -> tuple[str, ...]:
        """The supported precisions, the default first. A CPU supports all, because its graphs dequantize what it cannot
        multiply.

        The oldest capability determines the precisions.
        """
        able = formats_of(self.capability or _ANY)
        others = (*able, "bf16") if self.capability else able
        return (self.precision, *(each for each in others if each != self.precision))

    @property
    def builds_anywhere(self) -> bool:
        """Whether engines can be built without the GPU."""
        return self.builder != "tensorrt"

    @property
    def capability_text(self) -> str:
        """The capabilities as text, such as `12.0` or `8.6, 8.9`; `-` for a CPU."""
        return ", ".join(f"{major}.{minor}" for major, minor in self.capabilities) or "-"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with one key per field."""
        data = asdict(self)
        data["capability"] = self.capability_text if self.capability else None
        data["precisions"] = list(self.precisions)
        data["default"] = self.default
        del data["precision"], data["newer"], data["recipe"]
        return data


# A CPU counts as having this compute capability, which is high enough for every format.
_ANY = (99, 0)
_RTX: BuilderName = "tensorrt-rtx"
_TRT: BuilderName = "tensorrt"
# This recipe has no measurable loss of quality, and takes 1 to 12% more predicted time than `nvfp4`, depending on GPU
# and batch (docs/performance.md).
_MIXED = "nvfp4-mixed"
TARGETS: tuple[Target, ...] = (
    Target("cpu", "none", None, None, "onnxruntime", "fp32", host="any"),
    Target(
        "rtx",
        "GeForce RTX 30, 40 and 50",
        24 * GB,
        (8, 6),
        _RTX,
        "int4",
        newer=((8, 9), (12, 0)),
    ),
    Target("rtx-3090", "GeForce RTX 3090", 24 * GB, (8, 6), _RTX, "int4"),
    Target("rtx-a6000", "RTX A6000", 48 * GB, (8, 6), _RTX, "int4"),
    Target("rtx-4080", "GeForce RTX 4080", 16 * GB, (8, 9), _RTX, "int4"),
    Target("rtx-4090", "GeForce RTX 4090", 24 * GB, (8, 9), _RTX, "int4"),
    Target("l4", "L4", 24 * GB, (8, 9), _RTX, "int4"),
    Target("rtx-6000-ada", "RTX 6000 Ada", 48 * GB, (8, 9), _RTX, "fp8"),
    Target("l40s", "L40S", 48 * GB, (8, 9), _RTX, "fp8"),
    Target("rtx-5080", "GeForce RTX 5080", 16 * GB, (12, 0), _RTX, "int4"),
    Target("rtx-5090", "GeForce RTX 5090", 32 * GB, (12, 0), _RTX, "nvfp4", recipe=_MIXED),
    Target(
        "rtx-pro-6000", "RTX PRO 6000 Blackwell", 96 * GB, (12, 0), _RTX, "nvfp4", recipe=_MIXED
    ),
    Target(
        "dgx-spark",
        "GB10 (unified memory)",
        128 * GB,
        (12, 1),
        _RTX,
        "nvfp4",
        host="aarch64",
        recipe=_MIXED,
    ),
    Target("a100", "A100", 80 * GB, (8, 0), _TRT, "int4"),
    Target("h100", "H100", 80 * GB, (9, 0), _TRT, "fp8"),
    Target("h200", "H200", 141 * GB, (9, 0), _TRT, "fp8"),
    Target("b200", "B200", 180 * GB, (10, 0), _TRT, "nvfp4", recipe=_MIXED),
    Target("dgx-station", "GB300", 252 * GB, (10, 3), _TRT, "nvfp4", host="aarch64", recipe=_MIXED),
)
_BY_NAME = {target.name: target for target in TARGETS}


def find_target(name: str) -> Target:
    """Return the target of that name. For any other name, raises UsageError, which lists the valid names."""
    target = _BY_NAME.get(name.strip().lower())
    if target is None:
        raise UsageError(f"unknown target {name.strip()!r}", f"give one of {', '.join(_BY_NAME)}")
    return target


def parse_targets(names: str) -> tuple[Target, ...]:
    """Parse names such as `cpu,rtx-5090` into targets, in the same order and without duplicates."""
    found = [find_target(name) for name in names.split(",") if name.strip()]
    if not found:
        raise UsageError("no target was named", f"give one of {', '.join(_BY_NAME)}")
    return tuple(dict.fromkeys(found))


def check_precision(target: Target, precision: str | None) -> str:
    """Return `precision`, or the target's default if it is None. If the target does not support `precision`, raise
    UsageError, which lists the valid precisions."""
    if precision is None:
        return target.precisions[0]
    if precision not in target.precisions:
        raise UsageError(
            f"{target.name} does not support precision {precision!r}",
            f"give one of {', '.join(target.precisions)}",
        )
    return precision
