"""The first stage: exports a Hugging Face checkpoint to a bundle of ONNX graphs."""
