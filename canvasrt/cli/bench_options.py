"""Options of `canvasrt bench`, for bundles and for servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from canvasrt.defaults import ANSWER_TIMEOUT, MAX_SECONDS
from canvasrt.option import option


@dataclass(frozen=True)
class Workload:
    """The work for measuring a bundle. A server's measurement uses only `rounds`."""

    prompt_tokens: int = field(
        default=64, metadata=option("Length of the random prompts.", least=1)
    )
    blocks: int = field(default=2, metadata=option("Blocks to generate per request.", least=1))
    steps: int | None = field(
        default=None,
        metadata=option("Denoising steps per block.", least=1, shown="the checkpoint's"),
    )
    early_stop: bool = field(
        default=False,
        metadata=option(
            "Whether blocks may finish early; --against always takes all steps.",
            flag="--early-stop/--all-steps",
            shown="all-steps",
        ),
    )
    batch: int = field(default=1, metadata=option("Number of requests that run together.", least=1))
    rounds: int = field(
        default=5, metadata=option("Number of measured rounds, after one warm-up round.", least=1)
    )


@dataclass(frozen=True)
class LoadOptions:
    """The load for measuring a server."""

    model: str | None = field(
        default=None, metadata=option("URL: the model.", metavar="NAME", shown="the server's first")
    )
    prompts: str = field(
        default="short",
        metadata=option(
            "URL: short, long, chat, agent, or a file with one prompt per line (or .jsonl).",
            metavar="SET|FILE",
        ),
    )
    sessions: int = field(default=32, metadata=option("URL: conversations in each round.", least=1))
    concurrency: int = field(
        default=1,
        metadata=option("URL: maximum number of conversations at a time.", least=1),
    )
    rate: float | None = field(
        default=None,
        metadata=option(
            "URL: conversations to start per second, at random times.",
            metavar="PER_SECOND",
            least=1e-3,
            shown="when another ends",
        ),
    )
    max_tokens: int = field(default=64, metadata=option("URL: maximum tokens per answer.", least=1))
    timeout: float = field(
        default=ANSWER_TIMEOUT,
        metadata=option(
            "URL: time limit per call, in seconds.", metavar="SECONDS", least=1, most=MAX_SECONDS
        ),
    )
    report: Path | None = field(
        default=None,
        metadata=option(
            "URL: write the figures to this folder, as bench.html and bench.json.", metavar="DIR"
        ),
    )
