"""The names of all metrics of our own."""

from __future__ import annotations

import re
from types import SimpleNamespace

from canvasrt import nvml
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.triton.metrics import Metrics


def metric_names() -> set[str]:
    names: set[str] = {f"canvasrt_gpu_{name}" for name in nvml.GAUGES}

    class Family:
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, name: str, description: str, kind: str) -> None:
            names.add(name)

        def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(set=lambda value: None)

    Metrics(SimpleNamespace(MetricFamily=Family))
    return names | set(re.findall(r"^# HELP (\S+) ", FrontMetrics().text(0), re.M))
