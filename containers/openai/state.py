"""The state of the front end: its settings, and the phase of the server behind it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.options import FrontOptions

ServerPhase = Literal["starting", "building", "loading", "serving", "failed", "stopping"]
# Seconds until a retry makes sense, and the message until then.
_WAIT = {
    "starting": (2, "The server is starting."),
    "building": (30, "The engines are being built for this GPU; this happens once."),
    "loading": (5, "The model is being loaded."),
    "failed": (5, "The engines have failed, and the server is ending."),
    "stopping": (2, "The server is stopping."),
}


@dataclass(frozen=True)
class FrontSettings:
    """What the supervisor hands to the front end's process. Sockets are inherited file descriptors."""

    socket: int
    grpc: str  # host:port
    metrics: str  # a URL
    options: FrontOptions
    health_socket: int | None = None
    heartbeat: int | None = None

    def to_line(self) -> bytes:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> FrontSettings:
        """Return the inverse of `to_line`."""
        data = json.loads(line)
        return cls(**{**data, "options": FrontOptions.from_json(data["options"])})


@dataclass
class State:
    """Follows the supervisor's reports. `detail` describes the progress of a phase."""

    phase: ServerPhase = "starting"
    detail: str = ""
    in_flight: int = 0

    def refusal(self) -> ApiError | None:
        """Return why a request cannot be accepted now; None when it can."""
        if self.phase == "serving":
            return None
        seconds, message = _WAIT[self.phase]
        error = unavailable(f"{message} {self.detail}".strip(), self.phase, seconds)
        if self.phase == "stopping":
            error.headers["Connection"] = "close"
        return error
