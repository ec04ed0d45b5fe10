"""Measurements of canvasrt, and the training of its demo: `python -m bench`. Not installed."""
