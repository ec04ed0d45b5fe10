"""Experts as our own kernels over rows sorted by expert, which run between a segment's engines."""
