"""docs/operating.md and docs/reference.md list the exit codes, variables and options of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from canvasrt.containers.names import (
    CALLER_SECRET_VARIABLE,
    EVIDENCE_VARIABLE,
    GPUS_VARIABLE,
    HEARTBEAT_VARIABLE,
    LEVEL_VARIABLE,
    REASON_VARIABLE,
    STOPPING_VARIABLE,
)
from canvasrt.containers.serve.settings import OPTION_CLASSES, VARIABLES
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError
from canvasrt.option import option_of
from tests import reference
from tests.helpers.metrics import metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operating.md"
PRODUCT = ("build", "canvasrt", "containers", "export", "runtime")
_VARIABLE = re.compile(r"\b(?:CANVASRT|NIM)_[A-Z][A-Z_]*[A-Z]\b")


def exit_codes() -> dict[int, str]:
    """Return the exit codes of canvasrt's errors, by number."""
    kinds = [CanvasError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.exit_code: kind.__name__ for kind in kinds}


def test_the_page_has_every_exit_code_of_an_error() -> None:
    codes = re.findall(r"^\| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    assert {str(code) for code in exit_codes()} <= set(codes)


def test_the_page_has_every_metric_that_it_names() -> None:
    named = set(re.findall(r"`(canvasrt_[a-z_]+[a-z])`", PAGE.read_text("utf-8")))
    assert named
    assert named <= metrics().keys()


def test_the_page_has_every_variable() -> None:
    """The page lists the variables that the product reads, except variables of options and variables that `serve` sets
    for its child processes."""
    sources = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    named = {name for file in sources for name in _VARIABLE.findall(file.read_text("utf-8"))}
    inner = {f"CANVASRT_{each.name.upper()}" for each in fields(ModelOptions)}
    inner |= {STOPPING_VARIABLE, HEARTBEAT_VARIABLE, REASON_VARIABLE}
    inner |= {GPUS_VARIABLE, EVIDENCE_VARIABLE, CALLER_SECRET_VARIABLE, LEVEL_VARIABLE}
    options = [option_of(each) for kind in OPTION_CLASSES for each in fields(kind)]
    inner |= {of.variable for of in options if of and of.variable}
    on_page = set(_VARIABLE.findall(PAGE.read_text("utf-8")))
    assert on_page == (named | set(VARIABLES)) - inner


def test_the_reference_is_what_the_code_says() -> None:
    """If this fails, run `.venv/bin/python -m tests.reference > docs/reference.md`."""
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == reference.page()
