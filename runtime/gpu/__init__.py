"""A model whose state stays in GPU memory."""
