"""All metrics of canvasrt."""

from __future__ import annotations

import re
from types import SimpleNamespace

from canvasrt import nvml
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.triton.metrics import Metrics


def metrics() -> dict[str, str]:
    """Return the description of each metric, by name."""
    found: dict[str, str] = {}

    class Family:
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, name: str, description: str, kind: str) -> None:
            found[name] = description

        def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(set=lambda value: None)

    Metrics(SimpleNamespace(MetricFamily=Family))
    found |= dict(re.findall(r"^# HELP (\S+) (.*)", FrontMetrics().text(0), re.M))
    return found | {f"canvasrt_gpu_{name}": gauge.about for name, gauge in nvml.GAUGES.items()}
