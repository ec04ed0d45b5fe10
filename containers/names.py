"""Names that several sides of serving agree on: folders of a package, and variables that Triton's models read."""

# Folders of a package.
ENGINES = "engines"
REPOSITORY = "models"
IMAGE = "image"  # what an image gets has a manifest of its own, here

# Where an image keeps its package.
ROOT = "/opt/canvasrt"
PACKAGE = f"{ROOT}/package"

# Environment variables from `serve` to the models inside Triton.
THREADS_VARIABLE = "CANVASRT_THREADS"
MAX_MODEL_LEN_VARIABLE = "CANVASRT_MAX_MODEL_LEN"
SHARE_PASSES_VARIABLE = "CANVASRT_SHARE_PASSES"  # 1: yes
STOPPING_VARIABLE = "CANVASRT_STOPPING"  # a file: once it exists, requests are refused
