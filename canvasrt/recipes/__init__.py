"""Quantization recipes: the YAML files that come with canvasrt, and what reads them."""
