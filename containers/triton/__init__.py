"""The two models of Triton's Python backend."""
