"""Runs a model whose caches and hidden states stay in GPU memory."""
