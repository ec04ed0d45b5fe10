"""ONNX graphs to engines for one target, and everything before that when given a checkpoint."""

from canvasrt.build.pipeline import BUILDERS, build, build_all
from canvasrt.build.plan import Plan, plan

__all__ = ["BUILDERS", "Plan", "build", "build_all", "plan"]
