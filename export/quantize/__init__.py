"""Quantization: calibration, low-precision formats, and their forms in graphs."""
