"""A build reuses an existing bundle only if it would write the same one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt.build.expert_forms import find_experts
from canvasrt.build.options import BuildOptions
from canvasrt.build.plan import Plan
from canvasrt.build.reuse import difference_from
from canvasrt.bundle import made_by
from canvasrt.pipeline import plan_all
from canvasrt.targets import parse_targets


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = BuildOptions("int4", max_context=2048)
    return plan_all("demo", parse_targets("rtx-4090"), "out", options, check=False)[0]


def difference(plan: Plan, **options: Any) -> str:
    """Return the message about the difference between a plan and engines built with different options."""
    manifest = SimpleNamespace(
        made_from={"source": plan.source.made_from},
        target={"name": plan.target.name},
        options=plan.options | options,
        made_by=made_by([plan.target.builder, "triton"]),
    )
    return difference_from(plan, manifest)  # type: ignore[arg-type]


def test_the_same_build_is_taken(plan: Plan) -> None:
    assert difference(plan) == ""
    assert difference(replace(plan, experts=find_experts("sorted")), experts="sorted") == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 8}, "max_batch 8, now 4"),
        ({"experts": "sorted"}, "experts sorted, now slots"),
        ({"prefill_chunk": 256}, "prefill_chunk 256, now 512"),
        ({"vision": False}, "vision False, now True"),
        ({"adapters": [{"files": {}, "weight": 1.0}]}, "with adapters"),
        ({"calibration": "0123"}, "with calibration"),
    ],
)
def test_an_option_that_only_the_earlier_build_had_is_told(
    plan: Plan, options: dict[str, Any], words: str
) -> None:
    assert difference(plan, **options) == f"with other options: {words}"
