"""Many connections that reconnect at once, and what a health check notices of them.

python -m tests.faults.flood --connections 300 --seconds 20
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.faults import attack
from tests.helpers.serving_process import ANY_PORTS, serving

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
TINY = HEAD + CHUNKED + b"2\r\nxx\r\n" * 50_000


@contextlib.contextmanager
def flood(host: str, request: bytes, connections: int) -> Iterator[None]:
    """Send a request on so many connections, from a process of its own, again whenever one ends."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(host, request, connections), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _run(host: str, request: bytes, connections: int) -> None:
    asyncio.run(_all(host, request, connections))


async def _all(host: str, request: bytes, connections: int) -> None:
    await asyncio.gather(*(_one(host, request) for _ in range(connections)))


async def _one(host: str, request: bytes) -> None:
    name, _, port = host.partition(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(name, int(port))
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.write(request)
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()


def health_delays(host: str, seconds: float) -> list[float]:
    """Return how long each of the checks took that were made one after the other for so long."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        status = attack.get(host, "/v1/health/live", timeout=30)[0]
        assert status == 200, status
        found.append(time.monotonic() - begin)
        time.sleep(0.02)
    return found


def main() -> int:
    """Run as a program; return the exit code."""
    given = attack.arguments(__doc__ or "", connections=300, seconds=20)
    with attack.workspace(given.package) as (package, folder):
        with serving(package, folder, *ANY_PORTS) as running:
            host = attack.host_of(running)
            with flood(host, TINY, given.connections):
                delays = sorted(health_delays(host, given.seconds))
    middle, longest = delays[len(delays) // 2], delays[-1]
    print(f"{len(delays)} checks of health: median {middle:.3f} s, longest {longest:.3f} s")
    return 0 if longest < 2 else 1


if __name__ == "__main__":
    sys.exit(main())
