"""The OpenAI-compatible front end: HTTP in front of the models that Triton serves."""
