from tests.helpers.serving import (
    _one_thread,
    engines,
    front,
    graphs,
    grpc,
    http,
    local,
    openai,
    packaged,
    server,
    tokenizer,
)

__all__ = [
    "_one_thread",
    "engines",
    "front",
    "graphs",
    "grpc",
    "http",
    "local",
    "openai",
    "packaged",
    "server",
    "tokenizer",
]
