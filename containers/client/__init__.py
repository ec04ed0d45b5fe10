"""Clients of a running server: for Triton, over HTTP and gRPC, and for the OpenAI API."""
