"""Backends that run engines: ONNX Runtime, TensorRT and TensorRT-RTX."""
