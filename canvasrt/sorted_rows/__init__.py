"""The experts as kernels of our own, over rows sorted by expert, which run between a segment's engines."""
