"""Writes container images without a daemon: reproducible OCI layouts and docker archives."""
