"""`canvasrt serve`: a package or engines behind a Triton server on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.generate import Threads
from canvasrt.cli.options import AsJson


def serve(
    bundle: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE",
            show_default=False,
            help="A folder that `canvasrt package` or `canvasrt build` wrote.",
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option("--http-port", metavar="PORT", help="HTTP; 0 takes a free port.")
    ] = 8080,
    grpc_port: Annotated[
        int, typer.Option("--grpc-port", metavar="PORT", help="gRPC; 0 takes a free port.")
    ] = 8001,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", metavar="PORT", help="Metrics; 0 takes a free port.")
    ] = 8002,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="FILE",
            show_default=False,
            help="Triton's output; - for stderr. Without it, a file in the state folder.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show Triton's output on stderr too.")
    ] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="SECONDS", help="For loading the engines.")
    ] = 600.0,
    exit_timeout: Annotated[
        int,
        typer.Option(
            "--exit-timeout", metavar="SECONDS", min=0, help="For requests in flight at the end."
        ),
    ] = 10,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Serve over HTTP and gRPC until Ctrl-C or SIGTERM."""
    from canvasrt.containers.ports import Ports
    from canvasrt.containers.serve import Settings, run

    settings = Settings(
        host=host,
        ports=Ports(http_port, grpc_port, metrics_port),
        log=log,
        verbose=verbose,
        ready_timeout=ready_timeout,
        exit_timeout=exit_timeout,
        threads=threads,
        as_json=as_json,
    )
    run(bundle, settings)
