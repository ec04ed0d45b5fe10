"""Quantization recipes: the YAML files that come with canvasrt, and the code that reads them."""
