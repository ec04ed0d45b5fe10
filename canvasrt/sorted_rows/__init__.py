"""Computes experts with our own kernels, which run between a segment's engines and take rows sorted by expert."""
