from tests.helpers.alone import alone, front
from tests.helpers.one_caller import model, running
from tests.helpers.serving import _one_thread, engines, graphs, packaged, tokenizer

__all__ = [
    "_one_thread",
    "alone",
    "engines",
    "front",
    "graphs",
    "model",
    "packaged",
    "running",
    "tokenizer",
]
