"""`canvasrt bench`: measures how fast a bundle generates, or how fast a server answers."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.bench_options import LoadOptions, Workload
from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import (
    AsJson,
    Device,
    SharePasses,
    Threads,
    argument,
    as_url,
    is_url,
    option,
    refuse,
)
from canvasrt.console import emit, progress, table
from canvasrt.errors import UsageError
from canvasrt.progress import report
from canvasrt.types import Json

if TYPE_CHECKING:
    from rich.console import Console

    from canvasrt.runtime.bench import Sample
    from canvasrt.runtime.model import Model
    from canvasrt.runtime.request import Request

Subject = Annotated[
    str,
    argument("BUNDLE|URL", "A bundle, or the address of any OpenAI-compatible server."),
]
Against = Annotated[
    str | None,
    option(
        "--against",
        "transformers|URL",
        "Also measure transformers (needs --checkpoint) or another server, in turns; print ratios.",
    ),
]
CheckpointOption = Annotated[
    str | None,
    option(
        "--checkpoint",
        "CHECKPOINT",
        "The bundle's checkpoint: a folder, a hub name, demo or demo-vision.",
    ),
]
# Options that apply only to servers, and options that apply only to bundles.
_OF_URL = {each.name for each in fields(LoadOptions)}
_OF_BUNDLE = {each.name for each in fields(Workload)} - {"rounds"}
_OF_BUNDLE |= {"checkpoint", "threads", "device", "share_passes"}


@with_fields("work", Workload)
@with_fields("load", LoadOptions)
def bench(
    context: typer.Context,
    bundle: Subject,
    against: Against = None,
    checkpoint: CheckpointOption = None,
    *,
    work: Workload,
    threads: Threads = None,
    device: Device = None,
    share_passes: SharePasses = False,
    load: LoadOptions,
    as_json: AsJson = False,
) -> None:
    """Measure a bundle in this process, or a server under load.

    Of a bundle, this measures time per pass, steps per block, tokens per second and first-token latency. Requests
    ignore end-of-sequence tokens, so that every round does the same work. Of a server, this measures first-token,
    per-block and total latency, tokens per second and errors. The API key comes from CANVASRT_API_KEY; for --against,
    from CANVASRT_AGAINST_API_KEY.

    Example: canvasrt bench engines --against transformers --checkpoint demo

    Example: canvasrt bench http://localhost:8000/v1 --concurrency 8 --report measured
    """
    if is_url(bundle):
        from canvasrt.cli.load import measure_servers

        refuse(context, _OF_BUNDLE, "is for measuring a bundle", "leave it out for a server")
        other = as_url(against) if against and is_url(against) else against
        measure_servers(as_url(bundle), other, work.rounds, load)
        return
    refuse(context, _OF_URL, "is for measuring a server", "leave it out for a bundle")
    _check(against, checkpoint, work.early_stop)
    _measure_bundle(
        bundle,
        work,
        {"threads": threads, "device": device, "share_passes": share_passes},
        checkpoint if against else None,
    )


def _check(against: str | None, checkpoint: str | None, early_stop: bool) -> None:
    if against not in (None, "transformers"):
        raise UsageError(f"unknown --against {against!r}", "give --against transformers")
    if against and checkpoint is None:
        raise UsageError(
            "--against transformers needs the checkpoint", "add --checkpoint FOLDER_OR_NAME"
        )
    if against and early_stop:
        raise UsageError(
            "--against does not allow --early-stop: the two sides could take different numbers of steps",
            "leave out one of them",
        )


def _measure_bundle(bundle: str, work: Workload, where: Json, checkpoint: str | None) -> None:
    """Measure a bundle and print the results. With a `checkpoint`, transformers also runs each round.

    `where` has the arguments `threads`, `device` and `share_passes` of `open_model`.
    """
    from canvasrt.checkpoints.locate import find_checkpoint
    from canvasrt.cli.against import Transformers
    from canvasrt.runtime.backends.onnxruntime import available_cores
    from canvasrt.runtime.bench import RunSummary, Spread, measure_round
    from canvasrt.runtime.open import open_model

    threads = where["threads"] or available_cores()
    model = open_model(bundle, **where | {"threads": threads})
    rounds = _requests(model, work)
    sides: dict[str, Any] = {"canvasrt": lambda requests: measure_round(model, requests)}
    if checkpoint is not None:
        sides["transformers"] = Transformers(find_checkpoint(checkpoint), threads).measure
    with progress():
        samples = _take_turns(sides, rounds)
    params = rounds[0][0].params
    settings = {
        "bundle": bundle,
        "threads": threads,
        "device": model.device_name,
        "batch": work.batch,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": params.max_new_tokens,
        "steps": params.max_denoising_steps,
        "early_stop": work.early_stop,
    }
    data: Json = {"settings": settings, "overflows": model.counters.overflows}
    data |= {name: RunSummary.of(taken).to_json() for name, taken in samples.items()}
    if checkpoint is not None:
        pairs = zip(samples["canvasrt"], samples["transformers"], strict=True)
        ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
        data["ratio"] = asdict(Spread.of(ratios))
    emit(data, lambda console: _render(console, data, list(samples)))


def _requests(model: Model, work: Workload) -> list[list[Request]]:
    """Return the requests of each round; the first round is the warm-up. All prompts and seeds differ."""
    from canvasrt.runtime.bench import random_prompts
    from canvasrt.runtime.request import Request
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
    # Check before the reference is loaded: loading can take minutes.
    requests[0].validate(model.config, model.max_context)
    return [requests[i : i + work.batch] for i in range(0, len(requests), work.batch)]


def _take_turns(sides: dict[str, Any], work: list[list[Request]]) -> dict[str, list[Sample]]:
    """Run every round on both sides before the next round, so that a busy machine affects both."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for index, requests in enumerate(work):
        report("measuring", index, len(work))
        # Alternate which side is first, because the second finds warm caches and idle threads.
        for name in list(sides) if index % 2 else reversed(sides):
            sample = sides[name](requests)
            if index:  # the first round is the warm-up
                samples[name].append(sample)
    report("measuring", len(work), len(work))
    return samples


def _render(console: Console, data: Json, sides: list[str]) -> None:
    settings, ratio = data["settings"], data.get("ratio")
    stop = "early stop" if settings["early_stop"] else f"{settings['steps']} steps per block"
    cpu = f"{settings['threads']} threads"
    where = cpu if settings["device"] == "cpu" else settings["device"]
    console.print(
        f"{settings['bundle']}: {settings['batch']} at a time, {settings['prompt_tokens']} prompt"
        f" and {settings['new_tokens']} new tokens, {stop}, on {where}",
    )

    def spread(key: str) -> list[str]:
        return [
            f"{_short(each['median'])} ({_short(each['p10'])} – {_short(each['p90'])})"
            for each in (data[side][key] for side in sides)
        ]

    rows = [
        ["forward pass, ms", *spread("forward_ms")],
        ["steps per block", *(f"{data[side]['steps_per_block']:.1f}" for side in sides)],
        ["tokens per second", *spread("tokens_per_second")],
        ["first tokens, ms", *spread("first_tokens_ms")],
    ]
    console.print(table(["median (10% – 90%)", *sides], rows))
    if ratio is not None:
        console.print(
            f"ratio of tokens per second: {ratio['median']:.2f}"
            f" ({ratio['min']:.2f} – {ratio['max']:.2f} over {data[sides[0]]['rounds']} rounds)"
        )


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"
