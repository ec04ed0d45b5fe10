"""Benchmarks of the released model's shape on a GPU: `python -m bench.gpu`. On a CPU, the shape is
reduced."""
