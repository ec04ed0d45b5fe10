"""Computes experts by our own kernels, which run between a segment's engines, on rows sorted by expert."""
