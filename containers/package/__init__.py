"""Writes packages: engines, Triton's model repository, and everything to build an image."""
