"""A server and a model for tests of demanding callers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.serving_process import ANY_PORTS, Serving, serving


@pytest.fixture(scope="session")
def running(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server without keys, with default limits."""
    with serving(packaged.path, tmp_path_factory.mktemp("running"), *ANY_PORTS) as found:
        yield found


@pytest.fixture(scope="session")
def model(engines: Bundle) -> Model:
    return open_model(engines.path, threads=1)


def request(model: Model, owner: str = "", **options: Any) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler, model.config, **{"max_new_tokens": 4, "max_denoising_steps": 2, **options}
    )
    return Request([2, 5, 6], params, owner=owner)
