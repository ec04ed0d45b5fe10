"""Models of tests/helpers/library.py, opened once for all tests of a session.

torch and transformers take seconds to import, so a fixture imports them when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from canvasrt.bundle import Bundle, load_bundle
from tests.helpers import library

if TYPE_CHECKING:
    from canvasrt.runtime.answers.grammar import Vocabulary
    from canvasrt.runtime.model import Model
    from tests.helpers.quantized import Quantized
    from tests.helpers.random_models import Graphs
    from tests.helpers.reference import Pair


@pytest.fixture(scope="session")
def tiny() -> Pair:
    """The tiny random model."""
    # With segments of four layers, the first has no full layer, and hidden states pass from one segment to the next.
    return _pair("tiny", layers_per_segment=4)


@pytest.fixture(scope="session")
def demo() -> Pair:
    """The demo checkpoint."""
    return _pair("demo")


@pytest.fixture(scope="session")
def demo_vision() -> Pair:
    """The bundled checkpoint with a vision tower."""
    return _pair("demo-vision")


@pytest.fixture(scope="session")
def undertrained() -> Pair:
    """The demo checkpoint at an early point of its training."""
    return _pair("undertrained")


def _pair(name: str, **options: Any) -> Pair:
    from tests.helpers.reference import make_pair

    return make_pair(name, **options)


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """Return a function: `prompt(length, seed)` is a random prompt without special tokens."""

    def make(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, 100, length).tolist()

    return make


@pytest.fixture(scope="session")
def words(demo: Pair) -> Vocabulary:
    """The demo's vocabulary, for grammars."""
    from tests.helpers.constrained import vocabulary

    return vocabulary(demo)


@pytest.fixture(scope="session")
def untrained(undertrained: Pair) -> Model:
    """The demo's untrained model, with its tokens in random order."""
    from tests.helpers.constrained import untrained_model

    return untrained_model(undertrained)


@pytest.fixture(scope="session")
def demo_graphs() -> Bundle:
    """The demo's graphs in fp32."""
    return load_bundle(library.graphs("demo"), check=False)


@pytest.fixture(scope="session")
def plain_graphs() -> Bundle:
    """Graphs in bf16: one sliding layer with heads of 256 and one full layer with heads of 512."""
    from tests.helpers.quantized import small_graphs

    return small_graphs()


@pytest.fixture(scope="session")
def quantized(
    plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Quantized]:
    """Return a function: `quantized(format)` is the quantized body of `plain_graphs`, created once per set of
    options."""
    from tests.helpers.quantized import quantizer

    return quantizer(plain_graphs, tmp_path_factory)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Graphs]]:
    """Return a function: `exported(shape)` returns the reference model and its graphs, created once per shape."""
    from tests.helpers.random_models import exporter

    return exporter(tmp_path_factory)
