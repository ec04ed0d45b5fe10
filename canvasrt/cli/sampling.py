"""The sampling options of `generate`, `infer` and `chat`: one per sampling parameter of the runtime."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from canvasrt.cli.field_options import with_options
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.sampling_params import PARAMETERS, Parameter, SamplingParams, check_sampling

# Parameter → its name in error messages.
LABELS = {each.name: each.option.partition("/")[0] for each in PARAMETERS}


def with_sampling(command: Callable[..., None], text_only: bool = False) -> Callable[..., None]:
    """Replace a command's argument `sampling` by one option for each sampling parameter.

    The command receives a mapping from parameter names to values, without parameters that are None. With `text_only`,
    parameters that ask for output in addition to text get no option. Raises UsageError for a value out of range.
    """

    def make(values: dict[str, Any]) -> dict[str, Any]:
        sampling = {name: value for name, value in values.items() if value is not None}
        _check(sampling)
        return sampling

    supported = [each for each in PARAMETERS if not (text_only and each.beside_text)]
    return with_options(
        command, "sampling", {each.name: _argument(each) for each in supported}, make
    )


def _argument(parameter: Parameter) -> inspect.Parameter:
    """Return the option of one parameter. None stands for the checkpoint's default."""
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


def _check(sampling: dict[str, Any]) -> None:
    try:
        check_sampling(sampling, LABELS)
    except CanvasError as error:
        raise UsageError(error.message, error.hint) from None
