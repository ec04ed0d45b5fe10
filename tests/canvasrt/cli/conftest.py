from tests.helpers.reference import demo, prompt, tiny, undertrained
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
    "demo",
    "engines",
    "front",
    "graphs",
    "grpc",
    "http",
    "local",
    "openai",
    "packaged",
    "prompt",
    "server",
    "tiny",
    "tokenizer",
    "undertrained",
]
