"""Quantization: recipes, calibration, the low-precision formats and the forms that TensorRT keeps in them."""
