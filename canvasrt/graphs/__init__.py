"""ONNX graphs as files: their weights, low-precision number formats, and the form that a CPU runs."""
