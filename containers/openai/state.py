"""What the front end was told: its settings, and what the server behind it is doing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from canvasrt.containers.openai.errors import ApiError, unavailable

Phase = Literal["starting", "building", "loading", "serving", "stopping"]
MAX_BODY = 16 * 2**20  # bytes; a context of 256k tokens, as ids, takes 2 MB
# Seconds after which to ask again, and what to say until then.
_WAIT = {
    "starting": (2, "The server is starting."),
    "building": (30, "The engines are being built for this GPU, which is done once."),
    "loading": (5, "The model is being loaded."),
    "stopping": (2, "The server is stopping."),
}


@dataclass(frozen=True)
class Settings:
    """What the supervisor hands to the front end. Sockets are numbers of inherited descriptors."""

    socket: int
    grpc: str  # host:port
    metrics: str  # a URL
    names: tuple[str, ...] = ("canvasrt",)
    keys: tuple[str, ...] = field(default=(), repr=False)
    about: dict[str, Any] = field(default_factory=dict)
    health_socket: int | None = None
    tls: dict[str, str] | None = None  # certificate, key and, for mutual TLS, ca
    log_level: str = "INFO"
    json_logs: bool = False
    max_body: int = MAX_BODY

    def to_line(self) -> bytes:
        """As one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Settings:
        """The inverse of `to_line`."""
        made = cls(**json.loads(line))
        return replace(made, names=tuple(made.names), keys=tuple(made.keys))


@dataclass
class State:
    """Changes as the supervisor tells. `detail` says how far a phase is."""

    phase: Phase = "starting"
    detail: str = ""
    in_flight: int = 0

    def refusal(self) -> ApiError | None:
        """Why a request cannot be taken now; None when it can."""
        if self.phase == "serving":
            return None
        seconds, message = _WAIT[self.phase]
        said = f"{message} {self.detail}".strip()
        error = unavailable(said, self.phase, seconds)
        if self.phase == "stopping":
            error.headers["Connection"] = "close"
        return error
