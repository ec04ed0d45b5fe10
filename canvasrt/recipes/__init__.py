"""Quantization recipes: the YAML files that come with canvasrt, and the code that reads them."""

from pathlib import Path

# The recipes that come with canvasrt, by name.
SHIPPED = dict(sorted((file.stem, file) for file in Path(__file__).parent.glob("*.yaml")))
