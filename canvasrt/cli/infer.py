"""`canvasrt infer`: one call to a running server."""

from typing import Annotated

import typer

from canvasrt.cli.generate import (
    Drafts,
    EarlyStop,
    EntropyBound,
    MaxNewTokens,
    Prompt,
    PromptIds,
    Raw,
    Seed,
    Steps,
    System,
    TMax,
    TMin,
)
from canvasrt.cli.options import AsJson

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="HOST:PORT",
        show_default=False,
        help="The server; without it, this machine with the protocol's own port.",
    ),
]
ProtocolName = Annotated[
    str, typer.Option("--protocol", metavar="NAME", help="http, grpc or openai.")
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Show each block as it is finished; over grpc or openai.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        show_default=False,
        help="End the answer before this text; can be given again.",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="For the whole answer.")
]


def infer(
    prompt: Prompt = None,
    url: Url = None,
    protocol: ProtocolName = "http",
    prompt_ids: PromptIds = None,
    system: System = None,
    raw: Raw = False,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    steps: Steps = None,
    t_min: TMin = None,
    t_max: TMax = None,
    entropy_bound: EntropyBound = None,
    early_stop: EarlyStop = True,
    stop: Stop = None,
    stream: Stream = False,
    drafts: Drafts = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Ask a server that is running.

    Example: canvasrt infer "Add 17 and 25" --protocol grpc --stream
    """
    from canvasrt.cli.ask import Question, ask

    question = Question(
        prompt=prompt,
        prompt_ids=prompt_ids,
        system=system,
        raw=raw,
        options={
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "max_denoising_steps": steps,
            "t_min": t_min,
            "t_max": t_max,
            "entropy_bound": entropy_bound,
            "early_stop": None if early_stop else False,
            "stop": stop or None,
        },
    )
    ask(question, url, protocol, timeout, stream=stream, drafts=drafts, as_json=as_json)
