"""Bandwidth and dense rates of matrix products by GPU, quoted from NVIDIA's documents but unchecked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canvasrt.errors import CanvasError, UsageError
from canvasrt.formats import ALL_CODES

# The shares of these rates that kernels are assumed to reach: guesses until a GPU is measured. On most cards, large
# copies reach 0.85 to 0.93 of the bandwidth, and products of a few hundred rows 0.6 to 0.8 of the peak.
BANDWIDTH_REACHED = 0.85
ARITHMETIC_REACHED = 0.75
# Seconds between two kernels of a captured graph: a guess too.
LAUNCH = 1.5e-6

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class GpuRates:
    """`bandwidth` is in bytes per second, `rates` in dense operations per second by the operands' format.

    Products of bf16, fp8 and fp4 accumulate in fp32. A format without a rate runs in the next wider one. `reached` and
    `arithmetic` are the shares of bandwidth and rates that kernels are assumed to reach.
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
        """Return the peak rate of products in a format, in operations per second."""
        for each in _WIDER[format]:
            if each in self.rates:
                return self.rates[each]
        raise KeyError(format)

    def bytes_per_second(self) -> float:
        """Return the bandwidth that a large copy reaches."""
        return self.bandwidth * self.reached

    def seconds(self, moved: float, operations: float, format: str) -> float:
        """Return the seconds that one kernel takes, its launch included."""
        computing = operations / (self.rate(format) * self.arithmetic) if operations else 0.0
        return max(moved / self.bytes_per_second(), computing) + self.launch


# If a GPU has no units for a format: the next one that can hold its values.
_WIDER = {each.rates[0]: (*each.rates, "bf16") for each in ALL_CODES.values() if each.rates} | {
    "bf16": ("bf16",),
    "fp32": ("fp32",),
}


def _gpu(name: str, gigabytes: float, source: str, **teraflops: float) -> GpuRates:
    rates = {format: value * TERA for format, value in teraflops.items()}
    return GpuRates(name, gigabytes * GIGA, rates, source)


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

# By target. GeForce cards accumulate bf16 and fp8 in fp32 at half their rate.
GPUS: dict[str, GpuRates] = {
    "rtx-3090": _gpu("GeForce RTX 3090", 936, _AMPERE, bf16=71, int8=284, fp32=35.6),
    "rtx-4090": _gpu("GeForce RTX 4090", 1008, _ADA, fp8=330.3, bf16=165.2, int8=660.6, fp32=82.6),
    "rtx-4080": _gpu("GeForce RTX 4080", 716.8, _ADA, fp8=194.9, bf16=97.5, int8=389.9, fp32=48.7),
    "rtx-5080": _gpu(
        "GeForce RTX 5080",
        960,
        _RTX_BLACKWELL,
        fp4=900.4,
        fp8=225.1,
        bf16=112.6,
        int8=450.2,
        fp32=56.3,
    ),
    "rtx-5090": _gpu(
        "GeForce RTX 5090",
        1792,
        _RTX_BLACKWELL,
        fp4=1676,
        fp8=419,
        bf16=209.5,
        int8=838,
        fp32=104.8,
    ),
    "rtx-pro-6000": _gpu(
        "RTX PRO 6000 Blackwell Workstation Edition",
        1792,
        _RTX_PRO_BLACKWELL,
        fp4=2015,
        fp8=1007.6,
        bf16=503.8,
        int8=1007.6,
        fp32=126,
    ),
    "dgx-spark": _gpu(
        "GB10",
        273,
        f"{_WORKSTATIONS}/dgx-spark: 273 GB/s, 1 PFLOP of sparse FP4; the rest scaled like RTX PRO Blackwell, and consistent"
        " with a measured 92 TFLOPS in bf16 and 218 GB/s (https://github.com/huggingface/kernels/pull/283)",
        fp4=500,
        fp8=250,
        bf16=125,
        int8=250,
        fp32=31,
    ),
    "rtx-a6000": _gpu(
        "RTX A6000", 768, f"{_VISUALIZATION}/rtx-a6000", bf16=154.8, int8=309.7, fp32=38.7
    ),
    "rtx-6000-ada": _gpu(
        "RTX 6000 Ada",
        960,
        f"{_VISUALIZATION}/rtx-6000",
        fp8=728.5,
        bf16=364.2,
        int8=728.5,
        fp32=91.1,
    ),
    "l4": _gpu("L4", 300, f"{_DATA_CENTER}/l4", fp8=242.5, bf16=121, int8=242.5, fp32=30.3),
    "l40s": _gpu("L40S", 864, f"{_DATA_CENTER}/l40s", fp8=733, bf16=362, int8=733, fp32=91.6),
    "a100": _gpu("A100 SXM 80 GB", 2039, f"{_DATA_CENTER}/a100", bf16=312, int8=624, fp32=19.5),
    "h100": _gpu(
        "H100 SXM", 3350, f"{_DATA_CENTER}/h100", fp8=1979, bf16=989.4, int8=1979, fp32=66.9
    ),
    "h200": _gpu(
        "H200 SXM", 4800, f"{_DATA_CENTER}/h200", fp8=1979, bf16=989.4, int8=1979, fp32=66.9
    ),
    "b200": _gpu(
        "B200 (HGX)",
        7700,
        f"{_DATA_CENTER}/hgx",
        fp4=9000,
        fp8=4500,
        bf16=2250,
        int8=4500,
        fp32=75,
    ),
    "dgx-station": _gpu(
        "GB300 (DGX Station)",
        7100,
        f"{_WORKSTATIONS}/dgx-station, {_DATA_CENTER}/hgx",
        fp4=14000,
        fp8=4500,
        bf16=2250,
        int8=150,
        fp32=75,
    ),
}


def find_gpu(name: str) -> GpuRates:
    """Return a GPU by name; UsageError lists the known ones."""
    gpu = GPUS.get(name.strip().lower())
    if gpu is None:
        raise UsageError(f"unknown GPU {name!r}", f"give one of {', '.join(GPUS)}")
    return gpu


def name_of(gpu: GpuRates) -> str:
    """Return what the table and `--gpu` call a GPU."""
    return next(key for key, each in GPUS.items() if each.name == gpu.name)


def named(device: str) -> str | None:
    """Return what the table calls the GPU that a driver calls `device`; None if it is not there."""
    words = set(re.split(r"[\s-]+", device.lower()))
    found = {key: _model(each.name) for key, each in GPUS.items() if _model(each.name) <= words}
    return max(found, key=lambda key: len(found[key]), default=None)


def _model(name: str) -> set[str]:
    """Return the words of a GPU's name that every driver's name for it has."""
    model = re.sub(r"GeForce|Blackwell.*|SXM.*|\(.*", "", name)
    return set(model.lower().split())


def measured(gpu: GpuRates, file: Path) -> GpuRates:
    """Return the GPU with the rates that `python -m bench.gpu` measured, from its gpu.json.

    The rate of a copy, bytes read plus bytes written, becomes the bandwidth that kernels reach. The rate of a matrix
    product, in bf16 or FP8, becomes the share of the peak of every format. A file without a launch's cost leaves the
    guess. Raises CanvasError for a file without rates, and UsageError for those of another GPU of the table. One that the
    table lacks may stand for any.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        rates = data["rates"]
        device = str(rates.get("device") or data.get("device"))
        bandwidth = float(rates["copy_bytes_per_second"])
        operations = rates.get("matrix_operations_per_second")
        launch = float(rates.get("launch_seconds", gpu.launch))
        format = str(rates.get("matrix", "")).rpartition(" ")[2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CanvasError(
            f"{file} has no measured rates: {error!r}",
            "give the gpu.json that `python -m bench.gpu -o DIR` writes",
        ) from error
    if device == "cpu":
        raise CanvasError(f"{file} was measured on a CPU", "run bench.gpu on the GPU")
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
