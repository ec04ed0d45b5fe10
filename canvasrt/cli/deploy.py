"""`canvasrt deploy`: runs a package as a container on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.options import AsJson
from canvasrt.containers.names import API_PORT

Package = Annotated[
    str,
    typer.Argument(
        metavar="PACKAGE",
        show_default=False,
        help="A folder or file that `canvasrt package` wrote, or the name of an image.",
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="The container's name.")]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="docker|podman",
        show_default="docker, else podman",
        help="The container engine.",
    ),
]
Listen = Annotated[
    str,
    typer.Option("--listen", metavar="ADDRESS", help="The address to listen on; 0.0.0.0 for all."),
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        metavar="PORT",
        min=1,
        max=65535,
        help="Port of the OpenAI API, health and metrics.",
    ),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        "--grpc-port",
        metavar="PORT",
        min=1,
        max=65535,
        show_default="closed",
        help="Port of Triton's gRPC API, which checks no key; not together with API keys.",
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        "--http-port",
        metavar="PORT",
        min=1,
        max=65535,
        show_default="closed",
        help="Port of Triton's HTTP API, which checks no key; not together with API keys.",
    ),
]
Gpus = Annotated[
    str,
    typer.Option("--gpus", metavar="all|N[,N...]", help="Which GPUs to use; only for GPU targets."),
]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="VOLUME|DIR",
        help="Where to keep engines that are built at the first start.",
    ),
]
Engines = Annotated[
    Path | None,
    typer.Option(
        "--engines",
        metavar="DIR",
        show_default=False,
        help="The engines to mount, for an image without any.",
    ),
]
ShmSize = Annotated[
    str,
    typer.Option(
        "--shm-size", metavar="SIZE", help="Size of the shared memory, for Triton's tensors."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", show_default=False, help="Memory limit."),
]
Cpus = Annotated[
    float | None,
    typer.Option("--cpus", metavar="N", show_default=False, help="CPU limit."),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NAME",
        show_default=False,
        help='Docker network to join, or "host".',
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        show_default=False,
        help="An environment variable; without a value, this shell's is passed on. May be given several times.",
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        metavar="FILE",
        show_default=False,
        help="A file of environment variables, for example with API keys.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0, help="How long it may take to become ready."
    ),
]
Show = Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")]


def deploy(
    package: Package,
    name: Name = "canvasrt",
    engine: Engine = None,
    listen: Listen = "127.0.0.1",
    port: Port = API_PORT,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    gpus: Gpus = "all",
    cache: Cache = "canvasrt-cache",
    engines: Engines = None,
    shm_size: ShmSize = "1g",
    memory: Memory = None,
    cpus: Cpus = None,
    network: Network = None,
    env: Env = None,
    env_file: EnvFile = None,
    timeout: Timeout = 3600.0,
    show: Show = False,
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

    emit(data, as_json, lambda console: _render(console, data))


def _render(console: Any, data: dict[str, Any]) -> None:
    console.print(f"ready after {data['seconds']} s   container {data['name']}", markup=False)
    for key in ("openai", "grpc", "http"):
        if key in data:
            console.print(f"{key:<7} {data[key]}", markup=False)
    console.print(f"stop    {data['engine']} stop {data['name']}", markup=False)
