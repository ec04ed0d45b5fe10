"""Segments in pieces, with kernels over sorted rows between them, on a fake TensorRT and Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.runtime.generator import Generator, Request
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, requests, same
from tests.helpers.sorted_bundles import build_sorted, open_sorted


@pytest.fixture(scope="module")
def bundle(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_sorted(tiny.graphs, tmp_path_factory.mktemp("sorted") / "engines")


def test_tokens_are_those_of_the_standard_form_and_of_transformers(
    bundle: Bundle, tiny: Pair, prompt: Prompt
) -> None:
    """Several blocks, of prompts that fill windows or leave padding, in fp32."""
    model, device = open_sorted(bundle)
    wanted = requests(tiny, prompt, [40, 150, 9], max_new_tokens=2 * CANVAS)
    results = Generator(model).run(wanted)
    same(results, Generator(tiny.model).run(wanted))
    for request, result in zip(wanted, results, strict=True):
        tiny.reference.generate([list(request.prompt_token_ids)], [request.params]).check([result])
    assert device.kernels_run
