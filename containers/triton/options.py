"""Options that `canvasrt serve` passes to the models inside Triton as environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import get_type_hints

from canvasrt.defaults import MAX_THREADS, PREFIX_CACHE
from canvasrt.errors import CanvasError, UsageError
from canvasrt.option import limit_option, option, read_count


@dataclass(frozen=True)
class ModelOptions:
    """Options of the models inside Triton, which read them from environment variables."""

    threads: int | None = field(
        default=None,
        metadata=option("Number of CPU threads.", least=1, most=MAX_THREADS, shown="every core"),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            "Maximum tokens per request, prompt plus answer.",
            metavar="TOKENS",
            least=1,
            shown="the engines' limit",
            variable="NIM_MAX_MODEL_LEN",
            read=read_count,
        ),
    )
    share_passes: str = field(
        default="auto",
        metadata=option(
            "On a GPU, let requests share passes, for higher throughput. With auto, they do if a trial on this GPU shows"
            " that sharing changes no bits of a request's results.",
            metavar="auto|on|off",
        ),
    )
    prefix_cache: int = field(
        default=PREFIX_CACHE,
        metadata=option(
            "Memory to cache prompt prefixes in, on the GPU if there is one; 0 turns the cache off.",
            metavar="MIB",
            least=0,
        ),
    )
    max_steps: int | None = field(
        default=None,
        metadata=limit_option("Maximum denoising steps per block that a request may ask for."),
    )
    max_passes: int | None = field(
        default=None,
        metadata=limit_option(
            "Maximum denoising passes of a request: blocks times steps times answers."
        ),
    )
    max_queue_tokens: int = field(
        default=1 << 22,
        metadata=limit_option(
            "Maximum number of tokens in all running and queued requests together.", shown=None
        ),
    )
    request_timeout: int | None = field(
        default=None,
        metadata=limit_option(
            "Time limit per request, including time in the queue.", metavar="SECONDS"
        ),
    )

    def __post_init__(self) -> None:
        if self.share_passes not in ("auto", "on", "off"):
            raise UsageError(f"--share-passes is {self.share_passes!r}", "give auto, on or off")

    def to_environment(self) -> dict[str, str]:
        """Return the options as environment variables. Options that are None are omitted, so that existing variables
        apply."""
        return {
            _variable(name): json.dumps(value)
            for name, value in asdict(self).items()
            if value is not None
        }

    def completed(self, environment: Mapping[str, str]) -> ModelOptions:
        """Return the options as the models will read them: options that are None come from `environment`."""
        return self.from_environment({**environment, **self.to_environment()})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ModelOptions:
        """Read the options from environment variables. Raises CanvasError for a value of the wrong type."""
        types = get_type_hints(cls)
        found = {}
        for each in fields(cls):
            text = environment.get(_variable(each.name), "")
            if not text:
                continue
            try:
                found[each.name] = json.loads(text)
            except ValueError:
                found[each.name] = text
            # In Python, bool is a subclass of int.
            if isinstance(found[each.name], bool) or not isinstance(
                found[each.name], types[each.name]
            ):
                wanted = "auto, on or off" if types[each.name] is str else "a whole number"
                raise CanvasError(
                    f"{_variable(each.name)} is {text!r}", f"set it to {wanted}, or unset it"
                )
        return cls(**found)


def _variable(name: str) -> str:
    return f"CANVASRT_{name.upper()}"
