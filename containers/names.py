"""Constants that several parts of serving share: ports, folders of a package, environment variables."""

from collections.abc import Callable

# Default ports, as in NIM's containers with Triton.
API_PORT, HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8080, 8001, 8002

# An architecture's name in Python → its name in container images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MACHINES = {image: machine for machine, image in ARCHITECTURES.items()}

# Folders and files of a package.
ENGINES = "engines"
MODEL_REPOSITORY = "models"
SBOM = "sbom.cdx.json"
IMAGE_FOLDER = "image"  # the manifest of an image's content

# The package's folder in an image.
ROOT = "/opt/canvasrt"
PACKAGE = f"{ROOT}/package"

# Path of a file. Once it exists, the models inside Triton refuse requests.
STOPPING_VARIABLE = "CANVASRT_STOPPING"
# Paths of two files that the decoupled model writes: its heartbeat, and the reason why it exits.
HEARTBEAT_VARIABLE, REASON_VARIABLE = "CANVASRT_HEARTBEAT", "CANVASRT_REASON"
# Path of the file where the decoupled model writes, as JSON, whether requests share passes, and why.
EVIDENCE_VARIABLE = "CANVASRT_EVIDENCE"
# The log level of the models: the level of the process that starts them.
LEVEL_VARIABLE = "CANVASRT_LOG_LEVEL"

# A random secret, drawn at every start. The front end prefixes callers' names with it, so that the models can trust
# these names.
CALLER_SECRET_VARIABLE = "CANVASRT_CALLER_SECRET"  # noqa: S105

# Number of GPUs that run an instance of the model; unset without GPUs.
GPUS_VARIABLE = "CANVASRT_GPUS"

# Set in a container whose health check should end a dead server.
END_UNHEALTHY = "CANVASRT_END_UNHEALTHY"

# Health checks: seconds per call, and the number of consecutive failures after which a server is ended. A readiness
# check calls both of Triton's models, and waits at most 3 seconds for each. A front end may be silent for 10 seconds
# before the supervisor replaces it; this silence must not end the server.
CHECK_TIMEOUT, FAILED_CHECKS = 8, 4

# Default timeouts of `canvasrt serve`, in seconds.
READY_TIMEOUT = 600.0  # minimum time allowed for loading; a serving profile can require more
EXIT_TIMEOUT = 10  # limit for requests in flight at shutdown
STALL_TIMEOUT = 300.0  # limit for a pass, including kernel compilation, and for preparing a request

# Addresses that only this machine can reach.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

# The API keys, separated by commas.
API_KEYS = "CANVASRT_API_KEYS"
# The Host names that a server without API keys accepts; `*` accepts any name.
ALLOWED_HOSTS = "CANVASRT_ALLOWED_HOSTS"
# Environment variables that `canvasrt deploy` and the compose file set by default, if only this machine can call the
# server. Variable → a function that returns its value for a container's name; "" leaves the variable unset.
CONTAINER_VARIABLES: dict[str, Callable[[str], str]] = {
    ALLOWED_HOSTS: lambda name: ",".join((*LOOPBACK, name)),
}
# OpenTelemetry's standard variable for a collector's address.
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Variables with secrets, which are removed from children's environments.
SECRETS = (
    "CANVASRT_AGAINST_API_KEY",
    "CANVASRT_API_KEY",
    API_KEYS,
    "CANVASRT_API_KEYS_FILE",
    "CANVASRT_SIGNING_PASSWORD",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "NGC_API_KEY",
)
