"""How long `canvasrt serve` waits unless it is told otherwise, in seconds."""

READY_TIMEOUT = 600.0  # for loading tens of gigabytes
EXIT_TIMEOUT = 10  # for requests in flight at shutdown
STALL_TIMEOUT = (
    300.0  # for one pass, whose shape may need kernels compiled, or for preparing a request
)
