"""Clients of a running server: Triton over HTTP and gRPC, and the OpenAI API."""
