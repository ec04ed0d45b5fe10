"""Names and numbers that several parts of serving agree on: ports, folders of a package,
environment variables."""

from collections.abc import Callable

# Ports. The defaults are those of the NIM containers that wrap Triton.
API_PORT, HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8080, 8001, 8002

# What container images call a machine's architecture, by Python's name for it.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MACHINES = {image: machine for machine, image in ARCHITECTURES.items()}

# Folders of a package.
ENGINES = "engines"
MODEL_REPOSITORY = "models"
IMAGE_FOLDER = "image"  # the manifest of what goes into an image

# Where an image keeps its package.
ROOT = "/opt/canvasrt"
PACKAGE = f"{ROOT}/package"

# Tells the models inside Triton the path of a file: once it exists, they refuse requests.
STOPPING_VARIABLE = "CANVASRT_STOPPING"
# Tell the model with the engines where to show its progress, and where to write why it ends.
HEARTBEAT_VARIABLE, REASON_VARIABLE = "CANVASRT_HEARTBEAT", "CANVASRT_REASON"

# Set in a container: its health check ends a server that is not alive any more.
END_UNHEALTHY = "CANVASRT_END_UNHEALTHY"

# Health checks: seconds for one call, and how many in a row find a server dead before it is told to stop. Being ready is
# asked of Triton's two models, each of which gets 3 seconds. The server itself replaces a front end after 10 seconds of
# silence, which must not look like its end.
CHECK_TIMEOUT, FAILED_CHECKS = 8, 4

# Callers on this machine only.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

# The names under which a server without API keys answers; `*` for any.
ALLOWED_HOSTS = "CANVASRT_ALLOWED_HOSTS"
# Variables of server options that `canvasrt deploy` takes too and the compose file passes on, and
# their values, by the container's name, where callers are on this machine only. "" sets none.
CONTAINER_VARIABLES: dict[str, Callable[[str], str]] = {
    ALLOWED_HOSTS: lambda name: ",".join((*LOOPBACK, name)),
}
# Variables with secrets, which no child process needs.
SECRETS = (
    "CANVASRT_API_KEYS",
    "CANVASRT_API_KEYS_FILE",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "NGC_API_KEY",
)
