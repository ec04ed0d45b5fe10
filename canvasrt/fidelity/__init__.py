"""The quality report of `canvasrt verify --reference`: how close a bundle is to transformers."""

from canvasrt.fidelity.report import failures, finite, measure_quality
from canvasrt.fidelity.write import check_report_folder, write_decisions, write_report

__all__ = [
    "check_report_folder",
    "failures",
    "finite",
    "measure_quality",
    "write_decisions",
    "write_report",
]
