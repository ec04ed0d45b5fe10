"""The first stage: a Hugging Face checkpoint becomes a bundle of ONNX graphs."""
