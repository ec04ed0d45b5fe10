"""`canvasrt bench`: measures how fast a bundle generates, or how fast a server answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.options import AsJson, Device, SharePasses, Threads, is_url, refuse
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from canvasrt.runtime.bench import RunSummary, Sample, Spread
    from canvasrt.runtime.generator import Request
    from canvasrt.runtime.model import Model

Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="transformers|URL",
        show_default=False,
        help="Also run the reference (needs --checkpoint) or another server, in turns; print ratios.",
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="CHECKPOINT",
        show_default=False,
        help="The bundle's checkpoint: a folder, a hub name, demo or demo-vision.",
    ),
]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Length of the random prompts.")
]
Blocks = Annotated[int, typer.Option("--blocks", min=1, help="Blocks to generate per request.")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, show_default="the checkpoint's", help="Denoising steps per block."
    ),
]
EarlyStop = Annotated[
    bool,
    typer.Option(
        "--early-stop/--all-steps",
        help="Whether blocks may finish early; --against always takes all steps.",
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, help="Number of requests that run together.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, help="Number of measured rounds, after one to warm up.")
]


Subject = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE|URL",
        show_default=False,
        help="A bundle, or the address of any OpenAI-compatible server.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", show_default="the first", help="URL: the model."),
]
PromptsOption = Annotated[
    str,
    typer.Option(
        "--prompts",
        metavar="SET|FILE",
        help="URL: short, long, chat, agent, or a file with a prompt per line (or .jsonl).",
    ),
]
Sessions = Annotated[
    int, typer.Option("--sessions", min=1, help="URL: conversations in each round.")
]
Concurrency = Annotated[
    int,
    typer.Option("--concurrency", min=1, help="URL: maximum number of conversations at a time."),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="PER_SECOND",
        min=1e-3,
        show_default="as slots free up",
        help="URL: conversations to start per second, at random times.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="URL: maximum tokens per answer.")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, metavar="SECONDS", help="URL: time limit per call, in seconds."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        show_default=False,
        help="URL: write the figures to this folder, as bench.html and bench.json.",
    ),
]
# Options that only one of the two takes.
_OF_URL = {"model", "prompts", "sessions", "concurrency", "rate", "max_tokens", "timeout", "report"}
_OF_BUNDLE = {"checkpoint", "prompt_tokens", "blocks", "steps", "early_stop", "batch", "threads"}
_OF_BUNDLE |= {"device", "share_passes"}


def bench(
    context: typer.Context,
    bundle: Subject,
    against: Against = None,
    checkpoint: CheckpointOption = None,
    prompt_tokens: PromptTokens = 64,
    blocks: Blocks = 2,
    steps: Steps = None,
    early_stop: EarlyStop = False,
    batch: BatchOption = 1,
    rounds: Rounds = 5,
    threads: Threads = None,
    device: Device = None,
    share_passes: SharePasses = False,
    model: ModelName = None,
    prompts: PromptsOption = "short",
    sessions: Sessions = 32,
    concurrency: Concurrency = 1,
    rate: Rate = None,
    max_tokens: MaxTokens = 64,
    timeout: Timeout = ANSWER_TIMEOUT,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Measure a bundle in this process, or a server under load.

    A bundle: time per pass, steps per block, tokens per second, first-token latency. Requests ignore
    the end of the sequence, so that every round does the same work.
    A server: first-token, per-block and total latency, tokens per second, errors. Keys come from
    CANVASRT_API_KEY, and from CANVASRT_AGAINST_API_KEY for --against.
    Example: canvasrt bench engines --against transformers --checkpoint demo
    Example: canvasrt bench http://localhost:8000/v1 --concurrency 8 --report measured
    """
    if is_url(bundle):
        from canvasrt.cli import load

        refuse(context, _OF_BUNDLE, "is for measuring a bundle", "leave it out for a server")
        wanted = load.LoadOptions(
            against=against,
            model=model,
            prompts=prompts,
            sessions=sessions,
            concurrency=concurrency,
            rate=rate,
            max_tokens=max_tokens,
            rounds=rounds,
            timeout=timeout,
            report=report,
        )
        load.measure_servers(bundle, wanted, as_json)
        return
    refuse(context, _OF_URL, "is for measuring a server", "leave it out for a bundle")
    _check(against, checkpoint, early_stop)
    work = Workload(prompt_tokens, blocks, steps, early_stop, batch, rounds)
    where = {"device": device, "share_passes": share_passes}
    measure_bundle(bundle, work, where, threads, checkpoint if against else None, as_json)


@dataclass(frozen=True)
class Workload:
    """What each round measures on a bundle."""

    prompt_tokens: int
    blocks: int
    steps: int | None
    early_stop: bool
    batch: int
    rounds: int


def measure_bundle(
    bundle: str,
    work: Workload,
    where: dict[str, Any],
    threads: int | None,
    checkpoint: str | None,
    as_json: bool,
) -> None:
    """Measure a bundle, in turns with transformers on `checkpoint` if there is one, and print it.

    `where` holds the arguments of `open_model` that choose the device.
    """
    from canvasrt.console import emit, progress
    from canvasrt.runtime.backends.onnxruntime import available_cores
    from canvasrt.runtime.bench import RunSummary
    from canvasrt.runtime.open import open_model

    threads = threads or available_cores()
    opened = open_model(bundle, threads, **where)
    rounds = _requests(opened, work)
    sides = {"canvasrt": _ours(opened)}
    if checkpoint is not None:
        sides["transformers"] = _theirs(checkpoint, threads)
    with progress() as show:
        samples = _take_turns(sides, rounds, show)
    summaries = {name: RunSummary.of(taken) for name, taken in samples.items()}
    ratio = None if checkpoint is None else _ratio(samples["canvasrt"], samples["transformers"])
    params = rounds[0][0].params
    settings = {
        "bundle": bundle,
        "threads": threads,
        "device": opened.device_name,
        "batch": work.batch,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": params.max_new_tokens,
        "steps": params.max_denoising_steps,
        "early_stop": work.early_stop,
    }
    data: dict[str, Any] = {"settings": settings, "overflows": opened.counters.overflows}
    data |= {name: summary.to_json() for name, summary in summaries.items()}
    if ratio is not None:
        data["ratio"] = ratio.to_json()
    emit(data, as_json, lambda console: _render(console, settings, summaries, ratio))


def _check(against: str | None, checkpoint: str | None, early_stop: bool) -> None:
    if against not in (None, "transformers"):
        raise UsageError(f"unknown --against {against!r}", "give --against transformers")
    if against and checkpoint is None:
        raise UsageError(
            "--against transformers needs the checkpoint", "add --checkpoint FOLDER_OR_NAME"
        )
    if against and early_stop:
        raise UsageError(
            "--against does not allow --early-stop: the two sides could take different steps",
            "leave out one of them",
        )


def _requests(model: Model, work: Workload) -> list[list[Request]]:
    """Return the requests of each round, and of one to warm up; prompts and seeds differ."""
    from canvasrt.runtime.bench import random_prompts
    from canvasrt.runtime.generator import Request
    from canvasrt.runtime.sampling_params import SamplingParams

    params = SamplingParams.from_defaults(
        model.sampler,
        model.config,
        max_new_tokens=work.blocks * model.canvas_length,
        max_denoising_steps=work.steps,
        early_stop=work.early_stop,
        eos_token_ids=(),
    )
    prompts = random_prompts(model.config, (work.rounds + 1) * work.batch, work.prompt_tokens)
    requests = [Request(ids, replace(params, seed=i)) for i, ids in enumerate(prompts)]
    # Before a reference is loaded, which can take minutes.
    requests[0].validate(model.config, model.max_context)
    return [requests[i : i + work.batch] for i in range(0, len(requests), work.batch)]


def _ours(model: Model) -> Any:
    from canvasrt.runtime.bench import measure_round

    return lambda requests: measure_round(model, requests)


def _theirs(checkpoint: str, threads: int) -> Any:
    from canvasrt.checkpoints import locate as checkpoints
    from canvasrt.cli.against import Transformers

    return Transformers(checkpoints.find_checkpoint(checkpoint), threads).measure


def _take_turns(
    sides: dict[str, Any], work: list[list[Request]], show: Any
) -> dict[str, list[Sample]]:
    """Run each round on every side before the next, so that a busy machine affects all sides."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for index, requests in enumerate(work):
        show("measuring", index, len(work))
        # The second finds warm caches and idle threads, so the order alternates.
        names = list(sides) if index % 2 else list(sides)[::-1]
        for name in names:
            sample = sides[name](requests)
            if index:  # the first round warms up
                samples[name].append(sample)
    show("measuring", len(work), len(work))
    return samples


def _ratio(ours: list[Sample], theirs: list[Sample]) -> Spread:
    """Return the ratio of tokens per second, ours over theirs, round by round."""
    from canvasrt.runtime.bench import Spread

    return Spread.of(
        [a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True)]
    )


def _render(
    console: Console,
    settings: dict[str, Any],
    summaries: dict[str, RunSummary],
    ratio: Spread | None,
) -> None:
    from canvasrt.console import table

    stop = "early stop" if settings["early_stop"] else f"{settings['steps']} steps per block"
    cpu = f"{settings['threads']} threads"
    where = cpu if settings["device"] == "cpu" else settings["device"]
    console.print(
        f"{settings['bundle']}: {settings['batch']} at a time, {settings['prompt_tokens']} prompt"
        f" and {settings['new_tokens']} new tokens, {stop}, on {where}",
        markup=False,
    )

    def row(name: str, pick: Any) -> list[str]:
        return [name, *(pick(summary) for summary in summaries.values())]

    rows = [
        row("forward pass, ms", lambda s: _spread(s.forward_ms)),
        row("steps per block", lambda s: f"{s.steps_per_block:.1f}"),
        row("tokens per second", lambda s: _spread(s.tokens_per_second)),
        row("first tokens, ms", lambda s: _spread(s.first_tokens_ms)),
    ]
    console.print(table(["median (10% – 90%)", *summaries], rows))
    if ratio is not None:
        console.print(
            f"ratio of tokens per second: {ratio.median:.2f}"
            f" ({ratio.least:.2f} – {ratio.most:.2f} over {_rounds(summaries)} rounds)"
        )


def _rounds(summaries: dict[str, RunSummary]) -> int:
    return next(iter(summaries.values())).rounds


def _spread(value: Spread) -> str:
    def short(number: float) -> str:
        return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"

    return f"{short(value.median)} ({short(value.p10)} – {short(value.p90)})"
