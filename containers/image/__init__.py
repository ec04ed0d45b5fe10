"""Container images without a daemon: OCI layouts and docker archives, the same bytes on every
run."""
