"""The second stage: ONNX graphs become engines for one target."""
