import pytest

from canvasrt.runtime.answers.grammar import Vocabulary
from canvasrt.runtime.model import Model
from tests.helpers.constrained import untrained_model, vocabulary
from tests.helpers.reference import Pair, demo, prompt, tiny, undertrained

__all__ = ["demo", "prompt", "tiny", "undertrained"]


@pytest.fixture(scope="module")
def words(demo: Pair) -> Vocabulary:
    return vocabulary(demo)


@pytest.fixture(scope="module")
def untrained(undertrained: Pair) -> Model:
    return untrained_model(undertrained)
