"""`canvasrt deploy`: runs a package as a container on this machine."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson, argument
from canvasrt.containers.deploy.options import (
    SERVER_CLASSES,
    SERVER_VARIABLES,
    DeployOptions,
)
from canvasrt.containers.names import CONTAINER_VARIABLES

Package = Annotated[
    str,
    argument("PACKAGE", "A folder or file that `canvasrt package` wrote, or the name of an image."),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="docker|podman",
        show_default="docker, or else podman",
        help="The container engine.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0,
        show_default="set by the image, at least an hour",
        help="Time limit for the container to become ready.",
    ),
]
# What the help shows for defaults that depend on the container's name. They apply only if the server listens on
# loopback.
_SERVER_DEFAULTS = {
    name: f"{text}, on loopback"
    for name, variable in SERVER_VARIABLES.items()
    if (text := CONTAINER_VARIABLES[variable]("NAME"))
}
Show = Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")]


@with_fields("options", DeployOptions)
@with_fields("server", *SERVER_CLASSES, unset=True, only=SERVER_VARIABLES, shown=_SERVER_DEFAULTS)
def deploy(
    package: Package,
    options: DeployOptions,
    server: dict[str, Any],
    engine: Engine = None,
    timeout: Timeout = None,
    show: Show = False,
    as_json: AsJson = False,
) -> None:
    """Run a package with docker or podman, and wait until it is ready."""
    from canvasrt.console import emit, progress
    from canvasrt.containers.deploy import deploy as work

    told = {
        SERVER_VARIABLES[name]: str(value) for name, value in server.items() if value is not None
    }
    options = replace(options, server=told)
    if show:
        commands = work.commands_of(package, options, engine)
        emit({"commands": commands}, lambda console: print("\n".join(commands)))
        return
    with progress():
        data = work.deploy(package, options, engine=engine, timeout=timeout)

    emit(data, lambda console: _render(console, data))


def _render(console: Any, data: dict[str, Any]) -> None:
    console.print(f"ready after {data['seconds']} s   container {data['name']}")
    for key in ("openai", "grpc", "http"):
        if key in data:
            console.print(f"{key:<7} {data[key]}")
    if not data["restarts"]:
        console.print(
            f"note    this {data['engine']} does not restart the container after a failure; use systemd for that"
        )
    console.print(f"stop    {data['engine']} stop {data['name']}")
