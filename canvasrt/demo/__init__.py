"""The demo: a tiny DiffusionGemma, its tasks, and the script that trained it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
