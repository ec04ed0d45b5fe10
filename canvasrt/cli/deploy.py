"""`canvasrt deploy`: runs a package as a container on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.options import AsJson


def deploy(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE",
            show_default=False,
            help="A folder or file that `canvasrt package` wrote, or the name of an image.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The container's name.")
    ] = "canvasrt",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="docker|podman",
            show_default="docker, else podman",
            help="The container engine.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDRESS", help="The address to listen on; 0.0.0.0 for all."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=1,
            max=65535,
            help="Port of the OpenAI API, health and metrics.",
        ),
    ] = 8000,
    grpc_port: Annotated[
        int,
        typer.Option(
            "--grpc-port", metavar="PORT", min=1, max=65535, help="Port of Triton's gRPC API."
        ),
    ] = 8001,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port",
            metavar="PORT",
            min=1,
            max=65535,
            show_default="closed",
            help="Port of Triton's HTTP API.",
        ),
    ] = None,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="all|N[,N...]", help="Which GPUs to use; only for GPU targets."
        ),
    ] = "all",
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            metavar="VOLUME|DIR",
            help="Where to keep engines that are built at the first start.",
        ),
    ] = "canvasrt-cache",
    engines: Annotated[
        Path | None,
        typer.Option(
            "--engines",
            metavar="DIR",
            show_default=False,
            help="The engines to mount, for an image without any.",
        ),
    ] = None,
    shm_size: Annotated[
        str,
        typer.Option(
            "--shm-size", metavar="SIZE", help="Size of the shared memory, for Triton's tensors."
        ),
    ] = "1g",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", show_default=False, help="Memory limit."),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option("--cpus", metavar="N", show_default=False, help="CPU limit."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            show_default=False,
            help='Docker network to join, or "host".',
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            show_default=False,
            help="An environment variable; without a value, that of this shell. May be given several times.",
        ),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(
            "--env-file",
            metavar="FILE",
            show_default=False,
            help="A file of environment variables, for example with API keys.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="How long it may take to become ready."),
    ] = 3600.0,
    show: Annotated[
        bool, typer.Option("--print", help="Print the commands instead of running them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a package with docker or podman, and wait until it is ready."""
    from canvasrt.console import emit, progress
    from canvasrt.containers.deploy import deploy as work
    from canvasrt.containers.deploy.command import Options

    options = Options(
        name=name,
        listen=listen,
        port=port,
        grpc_port=grpc_port,
        http_port=http_port,
        gpus=gpus,
        cache=cache,
        engines=engines,
        shm_size=shm_size,
        memory=memory,
        cpus=cpus,
        network=network,
        variables=tuple(env or ()),
        variables_file=env_file,
    )
    if show:
        commands = work.shown(package, options, engine)
        emit({"commands": commands}, as_json, lambda console: print("\n".join(commands)))
        return
    with progress() as report:
        data = work.deploy(package, options, engine=engine, timeout=timeout, progress=report)

    def render(console: Any) -> None:
        console.print(f"ready after {data['seconds']} s   container {data['name']}", markup=False)
        for key in ("openai", "grpc", "http"):
            if key in data:
                console.print(f"{key:<7} {data[key]}", markup=False)
        console.print(f"stop    {data['engine']} stop {data['name']}", markup=False)

    emit(data, as_json, render)
