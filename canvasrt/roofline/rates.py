"""Every GPU's bandwidth and dense matrix-product rates, as stated in NVIDIA's documents; they are not measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canvasrt.errors import CanvasError, UsageError
from canvasrt.formats import ALL_CODES

# The shares of bandwidth and peak arithmetic that kernels are assumed to reach: guesses until a GPU is measured. On
# most cards, large copies reach 0.85 to 0.93 of the bandwidth, and products of a few hundred rows 0.6 to 0.8 of the
# peak.
BANDWIDTH_REACHED = 0.85
ARITHMETIC_REACHED = 0.75
# Seconds between two kernels of a captured graph; this is a guess, too.
LAUNCH = 1.5e-6

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class GpuRates:
    """`bandwidth` is in bytes per second, `rates` in dense operations per second by the operands' format.

    Products of bf16, fp8 and fp4 accumulate in fp32. Products in a format without a rate run in the next wider format.
    Kernels are assumed to reach the share `reached` of the bandwidth and the share `arithmetic` of the rates.
    """

    name: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str
    reached: float = BANDWIDTH_REACHED
    arithmetic: float = ARITHMETIC_REACHED
    launch: float = LAUNCH
    measured: str = ""

    def rate(self, format: str) -> float:
        """Return the peak rate of matrix products in a format, in operations per second."""
        for each in _WIDER[format]:
            if each in self.rates:
                return self.rates[each]
        raise KeyError(format)

    def bytes_per_second(self) -> float:
        """Return the bandwidth that a large copy reaches."""
        return self.bandwidth * self.reached

    def seconds(self, moved: float, operations: float, format: str) -> float:
        """Return the seconds of one kernel, including its launch."""
        computing = operations / (self.rate(format) * self.arithmetic) if operations else 0.0
        return max(moved / self.bytes_per_second(), computing) + self.launch


# Format → the formats in which its products can run: the format itself, then wider formats for GPUs that have no rate
# for it.
_WIDER = {each.rates[0]: (*each.rates, "bf16") for each in ALL_CODES.values() if each.rates} | {
    "bf16": ("bf16",),
    "fp32": ("fp32",),
}


_NVIDIA, _IMAGES = "https://www.nvidia.com", "https://images.nvidia.com/aem-dam/Solutions/geforce"
_ADA = f"Ada architecture whitepaper, {_IMAGES}/ada/nvidia-ada-gpu-architecture.pdf"
_AMPERE = f"GA102 whitepaper, {_NVIDIA}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_RTX_BLACKWELL = (
    f"RTX Blackwell whitepaper, {_IMAGES}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_RTX_PRO_BLACKWELL = (
    f"RTX PRO Blackwell whitepaper, {_NVIDIA}/content/dam/en-zz/Solutions/design-visualization/"
    "quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)
_DATA_CENTER = f"{_NVIDIA}/en-us/data-center"
_WORKSTATIONS = f"{_NVIDIA}/en-us/products/workstations"
_VISUALIZATION = f"{_NVIDIA}/en-us/design-visualization"

_SPARK = (
    f"{_WORKSTATIONS}/dgx-spark: 273 GB/s, 1 PFLOP of sparse FP4; the rest scaled like RTX PRO Blackwell, and consistent"
    " with a measured 92 TFLOPS in bf16 and 218 GB/s (https://github.com/huggingface/kernels/pull/283)"
)

# One row per target: its name, the GPU's name, gigabytes per second, tera-operations per second in `_FORMATS`, and the
# source. GeForce cards multiply bf16 and fp8 at half their rate when they accumulate in fp32.
_FORMATS = ("fp4", "fp8", "bf16", "int8", "fp32")
_TABLE: tuple[tuple[str, str, float, tuple[float | None, ...], str], ...] = (
    ("rtx-3090", "GeForce RTX 3090", 936, (None, None, 71, 284, 35.6), _AMPERE),
    ("rtx-4090", "GeForce RTX 4090", 1008, (None, 330.3, 165.2, 660.6, 82.6), _ADA),
    ("rtx-4080", "GeForce RTX 4080", 716.8, (None, 194.9, 97.5, 389.9, 48.7), _ADA),
    ("rtx-5080", "GeForce RTX 5080", 960, (900.4, 225.1, 112.6, 450.2, 56.3), _RTX_BLACKWELL),
    ("rtx-5090", "GeForce RTX 5090", 1792, (1676, 419, 209.5, 838, 104.8), _RTX_BLACKWELL),
    (
        "rtx-pro-6000",
        "RTX PRO 6000 Blackwell Workstation Edition",
        1792,
        (2015, 1007.6, 503.8, 1007.6, 126),
        _RTX_PRO_BLACKWELL,
    ),
    ("dgx-spark", "GB10", 273, (500, 250, 125, 250, 31), _SPARK),
    (
        "rtx-a6000",
        "RTX A6000",
        768,
        (None, None, 154.8, 309.7, 38.7),
        f"{_VISUALIZATION}/rtx-a6000",
    ),
    (
        "rtx-6000-ada",
        "RTX 6000 Ada",
        960,
        (None, 728.5, 364.2, 728.5, 91.1),
        f"{_VISUALIZATION}/rtx-6000",
    ),
    ("l4", "L4", 300, (None, 242.5, 121, 242.5, 30.3), f"{_DATA_CENTER}/l4"),
    ("l40s", "L40S", 864, (None, 733, 362, 733, 91.6), f"{_DATA_CENTER}/l40s"),
    ("a100", "A100 SXM 80 GB", 2039, (None, None, 312, 624, 19.5), f"{_DATA_CENTER}/a100"),
    ("h100", "H100 SXM", 3350, (None, 1979, 989.4, 1979, 66.9), f"{_DATA_CENTER}/h100"),
    ("h200", "H200 SXM", 4800, (None, 1979, 989.4, 1979, 66.9), f"{_DATA_CENTER}/h200"),
    ("b200", "B200 (HGX)", 7700, (9000, 4500, 2250, 4500, 75), f"{_DATA_CENTER}/hgx"),
    (
        "dgx-station",
        "GB300 (DGX Station)",
        7100,
        (14000, 4500, 2250, 150, 75),
        f"{_WORKSTATIONS}/dgx-station, {_DATA_CENTER}/hgx",
    ),
)
GPUS: dict[str, GpuRates] = {
    key: GpuRates(
        name,
        bandwidth * GIGA,
        {format: rate * TERA for format, rate in zip(_FORMATS, rates, strict=True) if rate},
        source,
    )
    for key, name, bandwidth, rates, source in _TABLE
}


def find_gpu(name: str) -> GpuRates:
    """Return a GPU by its name in the table. For any other name, raises UsageError, which lists the known names."""
    gpu = GPUS.get(name.strip().lower())
    if gpu is None:
        raise UsageError(f"unknown GPU {name!r}", f"give one of {', '.join(GPUS)}")
    return gpu


def name_of(gpu: GpuRates) -> str:
    """Return a GPU's name in the table, which is also its name for `--gpu`."""
    return next(key for key, each in GPUS.items() if each.name == gpu.name)


def named(device: str) -> str | None:
    """Return the table's name of the GPU that a driver calls `device`; None if the table does not have that GPU."""
    words = set(re.split(r"[\s-]+", device.lower()))
    found = {key: _model(each.name) for key, each in GPUS.items() if _model(each.name) <= words}
    return max(found, key=lambda key: len(found[key]), default=None)


def _model(name: str) -> set[str]:
    """Return the words of a GPU's name that drivers also use."""
    model = re.sub(r"GeForce|Blackwell.*|SXM.*|\(.*", "", name)
    return set(model.lower().split())


def measured(gpu: GpuRates, file: Path) -> GpuRates:
    """Return the GPU with the rates that `python -m bench floor -o FILE` measured.

    The rate of a copy, bytes read plus bytes written, becomes the bandwidth that kernels reach. The measured rate of a
    matrix product in bf16 or FP8, divided by its peak, is the share of the peak that every format is assumed to reach.
    If the file has no time for a launch, the guessed time is used. Raises CanvasError for a file without rates, and
    UsageError for rates of another GPU in the table. Rates of a GPU that is not in the table are accepted.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        data = data.get("figures", data)
        rates = data["rates"]
        device = str(rates.get("device") or data.get("device"))
        bandwidth = float(rates["copy_bytes_per_second"])
        operations = rates.get("matrix_operations_per_second")
        launch = float(rates.get("launch_seconds", gpu.launch))
        format = str(rates.get("matrix", "")).rpartition(" ")[2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CanvasError(
            f"{file} has no measured rates: {error!r}",
            "give the file that `python -m bench floor -o FILE` writes",
        ) from error
    if device == "cpu":
        raise CanvasError(f"{file} was measured on a CPU", "run `python -m bench floor` on the GPU")
    there = named(device)
    if there not in (None, name_of(gpu)):
        raise UsageError(
            f"{file} was measured on {device}, not on {gpu.name}",
            f"give --gpu {there}, or leave --rates out",
        )
    found = replace(
        gpu, bandwidth=bandwidth, reached=1.0, launch=launch, measured=f"{device}, {file}"
    )
    if operations and format in gpu.rates:
        found = replace(found, arithmetic=float(operations) / gpu.rates[format])
    return found
