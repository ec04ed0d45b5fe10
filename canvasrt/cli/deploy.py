"""`canvasrt deploy`: a package as a container on this machine."""

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
            help="What `canvasrt package` wrote, or the name of an image that docker has.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="What the container is called.")
    ] = "canvasrt",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="docker|podman",
            show_default=False,
            help="What runs it; without it, docker, else podman.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Where to listen; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="The OpenAI API, health and metrics.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option("--grpc-port", metavar="PORT", help="Triton's gRPC.")
    ] = 8001,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port", metavar="PORT", show_default=False, help="Triton's HTTP, if wanted."
        ),
    ] = None,
    gpus: Annotated[
        str,
        typer.Option("--gpus", metavar="all|N[,N...]", help="Which GPUs; for GPU targets alone."),
    ] = "all",
    cache: Annotated[
        str,
        typer.Option(
            "--cache", metavar="VOLUME|DIR", help="Keeps engines that are built at the first start."
        ),
    ] = "canvasrt-cache",
    engines: Annotated[
        Path | None,
        typer.Option(
            "--engines",
            metavar="DIR",
            show_default=False,
            help="Engines to mount, for an image without any.",
        ),
    ] = None,
    shm_size: Annotated[
        str, typer.Option("--shm-size", metavar="SIZE", help="Shared memory, for Triton's tensors.")
    ] = "1g",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", show_default=False, help="A limit of memory."),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option("--cpus", metavar="N", show_default=False, help="A limit of CPUs."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network", metavar="NAME", show_default=False, help="A network of docker's, or host."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            show_default=False,
            help="A variable, such as NIM_SERVED_MODEL_NAME; without a value, this shell's.",
        ),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(
            "--env-file", metavar="FILE", show_default=False, help="A file of them; for API keys."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For it to become ready.")
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
