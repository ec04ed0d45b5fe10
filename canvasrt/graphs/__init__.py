"""Edits ONNX graph files: weights, low-precision formats, and lowering for a CPU."""
