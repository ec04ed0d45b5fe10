"""Names and numbers that several parts of serving agree on: ports, folders of a package,
environment variables."""

from collections.abc import Callable

# Ports. The defaults are those of the NIM containers that wrap Triton.
API_PORT, HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8080, 8001, 8002

# Python's name of a machine's architecture → that of container images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MACHINES = {image: machine for machine, image in ARCHITECTURES.items()}

# Folders of a package.
ENGINES = "engines"
MODEL_REPOSITORY = "models"
SBOM = "sbom.cdx.json"
IMAGE_FOLDER = "image"  # the manifest of what goes into an image

# Where an image keeps its package.
ROOT = "/opt/canvasrt"
PACKAGE = f"{ROOT}/package"

# The path of a file; once it exists, the models inside Triton refuse requests.
STOPPING_VARIABLE = "CANVASRT_STOPPING"
# The file of the engine model's heartbeat, and the file for the reason of its end.
HEARTBEAT_VARIABLE, REASON_VARIABLE = "CANVASRT_HEARTBEAT", "CANVASRT_REASON"
# Where it writes, as JSON, whether requests share passes, and why.
EVIDENCE_VARIABLE = "CANVASRT_EVIDENCE"

# What the front end puts before the name of a caller, so that the models believe it. Drawn at every start.
CALLER_SECRET_VARIABLE = "CANVASRT_CALLER_SECRET"  # noqa: S105

# How many GPUs each run an instance of the model; unset without any.
GPUS_VARIABLE = "CANVASRT_GPUS"

# Set in a container: its health check ends a server that is not alive any more.
END_UNHEALTHY = "CANVASRT_END_UNHEALTHY"

# Health checks: seconds for one call, and how many failures in a row end a server. Readiness asks both of Triton's models, with
# 3 seconds for each. The server itself replaces a front end after 10 seconds of
# silence, which must not look like its end.
CHECK_TIMEOUT, FAILED_CHECKS = 8, 4

# How long `canvasrt serve` waits unless it is told otherwise, in seconds.
READY_TIMEOUT = 600.0  # for loading tens of gigabytes, if their plan says no more
EXIT_TIMEOUT = 10  # for requests in flight at shutdown
STALL_TIMEOUT = (
    300.0  # for one pass, whose shape may need kernels compiled, or for preparing a request
)

# Callers on this machine only.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

# The names under which a server without API keys answers; `*` for any.
ALLOWED_HOSTS = "CANVASRT_ALLOWED_HOSTS"
# Variables of server options that `canvasrt deploy` sets and the compose file passes on: variable →
# its value by the container's name, if only this machine calls it. "" sets none.
CONTAINER_VARIABLES: dict[str, Callable[[str], str]] = {
    ALLOWED_HOSTS: lambda name: ",".join((*LOOPBACK, name)),
}
# OpenTelemetry's standard variable for the address of a collector.
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Variables with secrets, which no child process needs.
SECRETS = (
    "CANVASRT_API_KEYS",
    "CANVASRT_API_KEYS_FILE",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "NGC_API_KEY",
)
