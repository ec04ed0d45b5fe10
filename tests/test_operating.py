"""The tables of docs/operating.md are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt import nvml
from canvasrt.containers.names import (
    CALLER_SECRET_VARIABLE,
    EVIDENCE_VARIABLE,
    GPUS_VARIABLE,
    HEARTBEAT_VARIABLE,
    REASON_VARIABLE,
    STOPPING_VARIABLE,
)
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.serve.settings import OPTION_CLASSES, VARIABLES
from canvasrt.containers.triton.metrics import Metrics
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError
from canvasrt.option import flags_of, option_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operating.md"
PRODUCT = ("build", "canvasrt", "containers", "export", "runtime")
_UNITS = {"SECONDS": " s", "MIB": " MiB"}
_VARIABLE = re.compile(r"\b(?:CANVASRT|NIM)_[A-Z][A-Z_]*[A-Z]\b")


def option_rows() -> list[str]:
    """Return the rows of all options of `canvasrt serve`: option, variable, default, meaning."""
    rows = []
    for kind in OPTION_CLASSES:
        for each in fields(kind):
            of = option_of(each)
            if of is None or not of.help:
                continue
            name = each.name + getattr(kind, "SUFFIX", "")
            flags = ", ".join(f"`{flag}`" for flag in flags_of(name, of))
            default = of.shown or _text(each.default, _UNITS.get(of.metavar or "", ""))
            variable = f"`{of.variable}`" if of.variable else ""
            rows.append(f"| {flags} | {variable} | {default} | {of.help} |")
    return rows


def _text(default: Any, unit: str) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ", ".join(default)
    return f"{default:g}{unit}" if isinstance(default, float) else f"{default}{unit}"


def metric_rows() -> list[str]:
    """Return the rows of all metrics of our own: name, type, meaning."""
    told: list[tuple[str, str, str]] = []

    class Family:
        GAUGE, COUNTER = "gauge", "counter"

        def __init__(self, name: str, description: str, kind: str) -> None:
            told.append((name, kind, description))

        def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(set=lambda value: None)

    Metrics(SimpleNamespace(MetricFamily=Family))
    found = re.findall(r"^# HELP (\S+) (.+)\n# TYPE \S+ (\w+)$", FrontMetrics().text(0), re.M)
    told += [(name, kind, about) for name, about, kind in found]
    told += [(f"canvasrt_gpu_{name}", "gauge", each.about) for name, each in nvml.GAUGES.items()]
    return [f"| `{name}` | {kind} | {about} |" for name, kind, about in told]


def exit_codes() -> dict[int, str]:
    """Return the codes of our errors, by number."""
    kinds = [CanvasError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.exit_code: kind.__name__ for kind in kinds}


@pytest.mark.parametrize("row", [*option_rows(), *metric_rows()])
def test_the_page_has_the_row(row: str) -> None:
    assert row in PAGE.read_text("utf-8").splitlines()


def test_the_page_has_no_other_option_or_metric() -> None:
    rows = re.findall(r"^\| `(?:--[a-z]|canvasrt_).*$", PAGE.read_text("utf-8"), re.M)
    assert sorted(rows) == sorted([*option_rows(), *metric_rows()])


def test_the_page_has_every_exit_code_of_an_error() -> None:
    codes = re.findall(r"^\| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    assert {str(code) for code in exit_codes()} <= set(codes)


def test_the_page_has_every_variable() -> None:
    """Exactly those that the product names, except variables that `serve` sets for its own children."""
    sources = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    named = {name for file in sources for name in _VARIABLE.findall(file.read_text("utf-8"))}
    inner = {f"CANVASRT_{each.name.upper()}" for each in fields(ModelOptions)}
    inner |= {STOPPING_VARIABLE, HEARTBEAT_VARIABLE, REASON_VARIABLE}
    inner |= {GPUS_VARIABLE, EVIDENCE_VARIABLE, CALLER_SECRET_VARIABLE}
    on_page = set(_VARIABLE.findall(PAGE.read_text("utf-8")))
    assert on_page == (named | set(VARIABLES)) - inner
