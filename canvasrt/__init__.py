"""canvasrt: from a DiffusionGemma checkpoint to a served model."""

__version__ = "0.1.0"
