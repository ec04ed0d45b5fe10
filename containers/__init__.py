"""Engines to a Triton image."""
