"""The state of the front end: the phase of the server behind it."""

from __future__ import annotations

from dataclasses import dataclass

from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.openai.options import ServerPhase

# Seconds until a retry makes sense, and the message until then.
_WAIT = {
    "starting": (2, "The server is starting."),
    "building": (30, "The engines are being built for this GPU; this happens once."),
    "loading": (5, "The model is being loaded."),
    "failed": (5, "The engines have failed, and the server is ending."),
    "stopping": (2, "The server is stopping."),
}


@dataclass
class ServerState:
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
