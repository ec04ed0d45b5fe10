"""The options of commands that ask a model: the prompt, images, the canvas and sampling."""

from __future__ import annotations

import base64
import inspect
import json
import mimetypes
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.field_options import with_options
from canvasrt.cli.options import argument, option, read_option
from canvasrt.defaults import MAX_SECONDS
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.sampling_params import (
    MAX_INT32,
    PARAMETERS,
    Parameter,
    SamplingParams,
    check_sampling,
)

if TYPE_CHECKING:
    from canvasrt.runtime.model import Model
    from canvasrt.runtime.pictures import Picture

# Sampling parameter → its name in error messages.
LABELS = {each.name: each.option.partition("/")[0] for each in PARAMETERS}

PromptText = Annotated[
    str | None,
    argument("PROMPT", "The user's message; - reads it from stdin."),
]
PromptIds = Annotated[
    str | None,
    option("--prompt-ids", "3,4,5", "Token ids to continue as they are, instead of PROMPT."),
]
System = Annotated[
    str | None,
    option("--system", "TEXT", "The system message."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue PROMPT as it is, without the chat template.")
]

Drafts = Annotated[
    bool,
    typer.Option(
        "--drafts", help="Also print the draft of each step; a terminal shows drafts in place."
    ),
]
CanvasJson = Annotated[
    str | None,
    option(
        "--canvas",
        "JSON",
        'Seed, pin or restrict the tokens at positions, as in {"pin": {"0": 17}}.',
    ),
]
AnswerTimeout = Annotated[
    float,
    option(
        "--timeout",
        "SECONDS",
        "How long the whole answer may take.",
        show_default=True,
        min=0.001,
        max=MAX_SECONDS,
    ),
]
Images = Annotated[
    list[Path] | None,
    option("--image", "FILE", "An image to put before the text; may be given several times."),
]
ImageTokens = Annotated[
    int,
    typer.Option("--image-tokens", metavar="N", help="Maximum tokens per image: 70, 140 or 280."),
]


@dataclass(frozen=True)
class PromptInput:
    """A prompt: `ids` if they are set, otherwise `text`. Unless `raw` is true, `text` is a message of a chat."""

    text: str = ""
    ids: list[int] | None = None
    system: str | None = None
    raw: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The text as a chat, preceded by the system message if there is one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


def read_prompt(
    text: str | None, ids: str | None = None, system: str | None = None, raw: bool = False
) -> PromptInput:
    """Return the prompt from a command's arguments. If `text` is `-`, it is read from stdin.

    Raises UsageError for no prompt, for an empty prompt, and for arguments that exclude each other.
    """
    if ids is not None:
        if text is not None or system is not None or raw:
            raise UsageError(
                "--prompt-ids is the whole prompt",
                "leave out PROMPT, --system and --raw, or leave out --prompt-ids",
            )
        return PromptInput(ids=_token_ids(ids))
    if text is None:
        raise UsageError("no prompt was given", "give PROMPT, - for stdin, or --prompt-ids 3,4,5")
    if raw and system is not None:
        raise UsageError("--raw does not allow --system", "leave out one of them")
    if not text.strip():
        raise UsageError("the prompt is empty", "give some text, or token ids with --prompt-ids")
    return PromptInput(read_text(text), system=system, raw=raw)


def read_text(text: str) -> str:
    """Return `text`, or standard input if `text` is `-`. Raises CanvasError if the result is empty or not UTF-8."""
    try:
        text = sys.stdin.read() if text == "-" else text
        text.encode()  # fails if the command line is not UTF-8: Python reads invalid bytes as surrogates
    except UnicodeError:
        raise UsageError("the prompt is not UTF-8", "give it in UTF-8") from None
    if not text.strip():
        raise CanvasError("the prompt is empty", "give some text on standard input")
    return text


def _token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) <= MAX_INT32 for word in words):
        raise UsageError(
            f"--prompt-ids is not a list of token ids: {text!r}",
            "give whole numbers separated by commas: --prompt-ids 3,4,5",
        )
    return [int(word) for word in words]


def canvas_conditions(text: str | None, infill: str | None = None) -> Any:
    """Parse the conditions of --canvas. Raises UsageError if they are invalid or combined with --infill."""
    if text is None:
        return None
    if infill is not None:
        raise UsageError("--infill does not allow --canvas", "leave out one of them")

    from canvasrt.runtime.conditions import read_conditions

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--canvas is not JSON: {error}", 'give {"pin": {"0": 17}}') from None
    return read_option(lambda: read_conditions(value))


def read_images(images: Sequence[Path], budget: int) -> list[tuple[Path, bytes]]:
    """Return the files of --image with their contents. Raises UsageError for an unsupported budget, and CanvasError for
    a file that cannot be read."""
    from canvasrt.runtime.pictures import BUDGETS

    if budget not in BUDGETS:
        listed = ", ".join(map(str, BUDGETS))
        raise UsageError(f"--image-tokens is {budget}", f"give one of {listed}")
    try:
        return [(path, path.read_bytes()) for path in images]
    except OSError as error:
        raise CanvasError(f"cannot read an image: {error}", "give readable files") from None


def pictures_of(files: Sequence[tuple[Path, bytes]], budget: int, model: Model) -> list[Picture]:
    """Return images as patches for the vision tower. Raises CanvasError if the model has no such tower, or if a
    file is not an image."""
    from canvasrt.runtime.pictures import check_pixels, read_picture

    if not files:
        return []
    model.check_vision()
    pictures = []
    for path, content in files:
        try:
            pictures.append(read_picture(content, model.config.vision or {}, budget))
        except CanvasError as error:
            raise CanvasError(f"{path}: {error.message}", error.hint) from None
    check_pixels([content for _, content in files])
    return pictures


def data_url(path: Path, content: bytes) -> str:
    """Return an image as a data URL for OpenAI's API."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def with_sampling(command: Callable[..., None], text_only: bool = False) -> Callable[..., None]:
    """Replace a command's argument `sampling` by one option for each sampling parameter.

    The command receives a mapping from parameter names to values, without parameters that are None. With `text_only`,
    parameters that ask for output in addition to text get no option. Raises UsageError for a value out of range.
    """

    def make(values: dict[str, Any]) -> dict[str, Any]:
        sampling = {name: value for name, value in values.items() if value is not None}
        try:
            check_sampling(sampling, LABELS)
        except CanvasError as error:
            raise UsageError(error.message, error.hint) from None
        return sampling

    supported = [each for each in PARAMETERS if not (text_only and each.beside_text)]
    return with_options(
        command, "sampling", {each.name: _sampling_option(each) for each in supported}, make
    )


def _sampling_option(parameter: Parameter) -> inspect.Parameter:
    """Return the option of one parameter. None means the checkpoint's default."""
    # Remove the default from the text, because the help shows it separately.
    about = re.sub(r"; \S+ when absent(, )?", "; ", parameter.about).removesuffix("; ")
    default = None if parameter.from_checkpoint else getattr(SamplingParams(), parameter.name)
    option = typer.Option(
        parameter.option,
        show_default="the checkpoint's" if parameter.from_checkpoint else True,
        help=f"{about[0].upper()}{about[1:]}.",
    )
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[parameter.kind | None, option],
    )
