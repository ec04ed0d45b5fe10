"""Quantization: calibration, low-precision formats, and the forms in which TensorRT keeps them."""
