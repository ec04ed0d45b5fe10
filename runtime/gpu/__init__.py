"""A model whose state stays in the GPU's memory."""
