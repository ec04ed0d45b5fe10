"""A package: engines, Triton's model repository, and everything that an image is built from."""
