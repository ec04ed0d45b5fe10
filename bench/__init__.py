"""Measurements of the whole model's shape on a GPU: `python -m bench.gpu`. On a CPU it runs reduced."""
