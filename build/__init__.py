"""The second stage: builds engines for one target from ONNX graphs."""
