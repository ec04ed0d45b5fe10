"""The chart's rules for Prometheus and its dashboard for Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.helm import check_schemas, needs_helm, render
from tests.helpers.metrics import metrics

pytestmark = needs_helm


def test_the_dashboard_asks_for_metrics_that_there_are(chart: Path) -> None:
    objects = render(chart, "dashboard.enabled=true")
    check_schemas(objects)
    dashboard = objects["ConfigMap"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(dashboard["data"]["canvasrt.json"])["panels"]
    asked = [each["expr"] for panel in panels for each in panel["targets"]]
    named = {name for expr in asked for name in re.findall(r"\b[a-z]+_[a-z_]{3,}\b", expr)}
    named -= {"histogram_quantile", "__rate_interval"}
    there = metrics().keys()
    assert {re.sub(r"_seconds_bucket$", "_seconds", name) for name in named} <= there
    assert {name for name in there if name.startswith("canvasrt_gpu_")} <= named
    assert "ConfigMap" not in render(chart)


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        ([], ["metrics"]),
        (["apiKeys.existingSecret=keys"], ["metrics", "http"]),
        (["allowedHosts={*}"], ["metrics"]),
        (["apiKeys.existingSecret=keys", "tls.existingSecret=tls"], ["metrics"]),
    ],
)
def test_prometheus_reads_what_answers_it(
    chart: Path, settings: list[str], ports: list[str]
) -> None:
    monitor = render(chart, "serviceMonitor.enabled=true", *settings)["ServiceMonitor"]
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == ports
