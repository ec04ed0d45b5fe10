"""Runs packages with docker or podman."""
