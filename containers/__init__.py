"""Packages engines as Triton images, and serves them."""
