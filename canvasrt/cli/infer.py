"""`canvasrt infer`: one call to a running server."""

from typing import Annotated, Any

import typer

from canvasrt.cli.answer_options import (
    AnswerTimeout,
    CanvasJson,
    Drafts,
    canvas_conditions,
)
from canvasrt.cli.options import AsJson, read_option
from canvasrt.cli.prompt import PromptIds, PromptText, Raw, System, read_prompt
from canvasrt.cli.sampling import with_sampling
from canvasrt.defaults import ANSWER_TIMEOUT

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="HOST:PORT",
        show_default="this machine, the protocol's port",
        help="The server's address.",
    ),
]
ProtocolName = Annotated[
    str, typer.Option("--protocol", metavar="NAME", help="http, grpc or openai.")
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Print text as soon as it is final; needs grpc or openai."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        show_default=False,
        help="End the answer before this text; may be given several times.",
    ),
]


@with_sampling
def infer(
    prompt: PromptText = None,
    url: Url = None,
    protocol: ProtocolName = "http",
    prompt_ids: PromptIds = None,
    system: System = None,
    raw: Raw = False,
    *,
    sampling: dict[str, Any],
    stop: Stop = None,
    canvas: CanvasJson = None,
    stream: Stream = False,
    drafts: Drafts = False,
    timeout: AnswerTimeout = ANSWER_TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Send a prompt to a running server.

    Example: canvasrt infer "12+34=" --protocol grpc --stream
    """
    from canvasrt.cli.call import ClientCall, ask, check_call
    from canvasrt.containers.tensors import check_stops

    check_call(protocol, stream, drafts)
    given = read_prompt(prompt, prompt_ids, system, raw)
    canvas_conditions(canvas)  # what is wrong is said here
    read_option(lambda: check_stops(stop or ()))
    options = {**sampling, "stop": stop or None, "canvas": canvas}
    ask(ClientCall(given, options, stream, drafts), protocol, url, timeout, as_json)
