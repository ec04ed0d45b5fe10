"""Checkpoints in the Hugging Face layout: where they are, their configuration, how they are quantized."""
