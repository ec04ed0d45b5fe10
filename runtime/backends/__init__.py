"""What runs engines: ONNX Runtime, TensorRT and TensorRT-RTX."""
