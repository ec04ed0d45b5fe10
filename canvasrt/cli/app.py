"""The `canvasrt` command: its subcommands, exit codes, and error messages."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
import traceback
from typing import Annotated, Any

import typer

from canvasrt import __version__
from canvasrt.console import print_error
from canvasrt.errors import CanvasError

_MAKE, _USE, _LOOK, _INSIDE = "Build", "Run", "Inspect", "Inside a container, as in NIM"
# Command → its panel on the help page. The command's function is in canvasrt/cli/<command>.py.
COMMANDS = {
    "demo": _MAKE,
    "export": _MAKE,
    "quantize": _MAKE,
    "build": _MAKE,
    "package": _MAKE,
    "generate": _USE,
    "serve": _USE,
    "deploy": _USE,
    "infer": _USE,
    "chat": _USE,
    "ask": _USE,
    "batch": _USE,
    "bench": _USE,
    "targets": _LOOK,
    "doctor": _LOOK,
    "inspect": _LOOK,
    "verify": _LOOK,
    "list-model-profiles": _INSIDE,
    "download-to-cache": _INSIDE,
    "create-model-store": _INSIDE,
}
# Commands whose module has a different name.
_MODULES = dict.fromkeys(
    ("list-model-profiles", "download-to-cache", "create-model-store"), "model_profiles"
)
_BUG_HINT = "this is a bug in canvasrt: run it again with --debug, and report the output"


def _show_version(value: bool) -> None:
    if value:
        print(f"canvasrt {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks and the builders' warnings."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Export DiffusionGemma to ONNX and TensorRT, and serve it through Triton.

    To try every step on the bundled demo checkpoint: canvasrt demo
    """


def command_line() -> Any:
    """Return the click application with all commands."""
    app = typer.Typer(
        name="canvasrt",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, panel in COMMANDS.items():
        function = name.replace("-", "_")
        module = importlib.import_module(f"canvasrt.cli.{_MODULES.get(name, function)}")
        app.command(name, rich_help_panel=panel)(getattr(module, function))
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        # If the help had boxes, its longest options and variables would not fit in 80 columns.
        command.rich_markup_mode = None
        command.help = command.help.replace("\nExample:", "\n\nExample:")
    return group


def parsed_command(name: str) -> Any:
    """Return a command as click's object. It has `help` and `params`; each parameter has `opts` and `help`."""
    return command_line().commands[name]


def run(arguments: list[str]) -> int:
    """Run one command. Return its exit code: 0 for success, 2 for wrong usage, 130 after an interruption, the code of a
    CanvasError, and 1 for any other error."""
    arguments, debug = _take_debug(arguments)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as with `<&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (stays open)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every terminal is UTF-8
    # Let CUDA number GPUs as nvidia-smi does; by default, CUDA gives the fastest GPU the number 0.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if debug:
        _show_log()
    if threading.current_thread() is threading.main_thread():
        from canvasrt.staging import raise_exit

        signal.signal(signal.SIGTERM, raise_exit)
    try:
        code = command_line()(arguments or ["--help"], prog_name="canvasrt", standalone_mode=False)
    except CanvasError as error:
        _show_traceback(debug)
        print_error(error.message, error.hint, error.log)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        return _failed(error, debug)
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code or 0


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Remove each `--debug` that precedes `--`. Return the remaining arguments, and whether any was removed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _failed(error: Exception, debug: bool) -> int:
    """Print an exception that is not a CanvasError, and return the exit code."""
    if getattr(error, "exit_code", None) == 2 and hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "canvasrt"
        print_error(error.format_message(), f"see `{command} --help`")
        return 2
    _show_traceback(debug)
    from canvasrt.staging import system_error

    found = system_error(error)
    if found is not None:
        print_error(found.message, found.hint)
    else:
        print_error(f"{type(error).__name__}: {error}", "" if debug else _BUG_HINT)
    return 1


def _show_log() -> None:
    """Print canvasrt's log, such as builders' warnings. Other loggers stay off, because they would slow down torch's
    exporter."""
    import logging

    logger = logging.getLogger("canvasrt")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler())


def _show_traceback(debug: bool) -> None:
    if debug:
        traceback.print_exc()
