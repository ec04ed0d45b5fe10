"""Checkpoints in the Hugging Face layout: where they are, how they are configured and quantized."""
