"""Generates docs/reference.md: `python -m tests.reference > docs/reference.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from canvasrt.cli.app import parsed_command
from canvasrt.containers.tensors import STREAM_MODEL, Tensor, inputs_of, outputs_of
from tests.helpers.metrics import metrics

_TOP = """# Reference

`.venv/bin/python -m tests.reference > docs/reference.md` writes this page from the code.

"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([each.replace("|", "\\|") for each in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def options(command: str) -> list[list[str]]:
    """Return the flags, default and meaning of a command's argument and options."""
    rows = []
    for each in parsed_command(command).params:
        if each.param_type_name == "argument":
            rows.append([f"`{each.name.upper()}`", "", each.help or ""])
        if each.param_type_name == "option" and each.name != "help":
            flags = "/".join([*each.opts, *each.secondary_opts])
            metavar = "" if each.is_flag else f" {each.metavar or 'N'}"
            default = each.show_default if isinstance(each.show_default, str) else ""
            rows.append([f"`{flags}{metavar}`", default, each.help or ""])
    return rows


def tensors(found: Iterable[Tensor]) -> str:
    """Return a table of inputs or outputs."""
    rows = (
        [f"`{each.name}`", each.datatype + "[]" * (each.shape == (-1,)), each.about]
        for each in found
    )
    return table(["name", "type", "meaning"], rows)


def page() -> str:
    """Return the whole page."""
    measured = ([f"`{name}`", about] for name, about in sorted(metrics().items()))
    parts = {
        "Options of `canvasrt serve`": table(["option", "default", "meaning"], options("serve")),
        "Inputs of the models in Triton": tensors(inputs_of(STREAM_MODEL)),
        "Outputs of the models in Triton": tensors(outputs_of(STREAM_MODEL)),
        "Metrics": table(["metric", "meaning"], measured),
    }
    return _TOP + "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


if __name__ == "__main__":
    print(page(), end="")
