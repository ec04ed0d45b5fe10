"""What runs inside Triton: the two models of the Python backend."""
