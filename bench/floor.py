"""Computes the floor of a pass: the time that reading the weights and the arithmetic take at measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from bench import results
from bench.shape import Prepared
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.runtime.bundle_facts import pass_work

# Precisions in which torch multiplies matrices on a GPU.
_MEASURED = ("bf16", "fp8")
_TIMES = 10
# The number of kernels in the graph that measures launches. With this many, the call and the final wait are negligible.
_LAUNCHES = 2000


def measure(precision: Literal["bf16", "fp8"] = "bf16", out: results.Out = None) -> None:
    """Measure this machine's GPU, for `canvasrt inspect --rates`."""
    results.report({"rates": rates(precision)}, out)


def rates(precision: str = "bf16") -> dict[str, Any]:
    """Return the bytes per second of a copy (reads plus writes), the operations per second of a matrix product, and
    `launch_seconds`, the time from one kernel of a captured graph to the next.

    Matrix products are measured only in bf16 and fp8. For other formats, the floor is the time to read the weights.
    """
    torch = require("torch", "export")
    if not torch.cuda.is_available():
        raise CanvasError(
            "torch can use no GPU here", "install torch with CUDA on a machine with a GPU"
        )
    size, width = 1 << 32, 8192
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)

    def timed(work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    copied = _best(timed(lambda: to.copy_(source)))
    found = {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_per_second": 2 * size / copied,
        "launch_seconds": _best(timed(_launches(torch))) / _LAUNCHES,
    }
    if precision not in _MEASURED:
        return found
    multiplied = _best(timed(_product(torch, width, precision)))
    return found | {
        "matrix_operations_per_second": 2 * width**3 / multiplied,
        "matrix": f"{width}³ {precision}",
    }


def _launches(torch: Any) -> Callable[[], Any]:
    """Return a function that runs a captured graph of `_LAUNCHES` tiny kernels, each of which waits for the one
    before."""
    number = torch.zeros(1, device="cuda")
    number.add_(1)  # loads the kernel, which must not happen during a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            number.add_(1)

    def replay() -> Any:
        graph.replay()
        return number  # keeps alive the tensor that the graph writes

    return replay


def _product(torch: Any, width: int, precision: str) -> Callable[[], Any]:
    """Return a function that multiplies two square matrices on the GPU."""
    a = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    if precision != "fp8":
        return lambda: a @ a
    narrow, scale = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    # The second operand must be column-major.
    return lambda: torch._scaled_mm(
        narrow, narrow.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
    )


def _best(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some runs."""
    took = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return min(took)


def floor_ms(prepared: Prepared, measured: dict[str, Any], batch: int) -> dict[str, float]:
    """Return milliseconds of a denoising pass: every weight read once, plus the necessary products.

    Keys, values and attention scores are not counted. At a context of 32K, they add bytes and operations.
    """
    reading = prepared.weight_bytes / measured["copy_bytes_per_second"]
    rate = measured.get("matrix_operations_per_second")
    computing = 2 * pass_work(prepared.config) * batch / rate if rate else 0.0
    return {
        "reading": 1e3 * reading,
        "computing": 1e3 * computing,
        "floor": 1e3 * max(reading, computing),
    }
