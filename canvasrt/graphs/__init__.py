"""All edits of ONNX graphs: joining traced layers, quantized forms, lowering for a CPU, and cuts."""
