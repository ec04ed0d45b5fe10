"""Images on a device: the same tokens as on the CPU, through a fake engine's buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import BUDGETS, insert, read_picture
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Pair
from tests.helpers.resident import same

PARAMS = SamplingParams(
    max_new_tokens=64, max_denoising_steps=8, entropy_bound=1.0, confidence_threshold=1.0
)


@pytest.fixture(scope="module")
def fake(tiny: Pair) -> tuple[DeviceModel, FakeBackend]:
    backend = FakeBackend()
    model = open_model(tiny.graphs, check=False, backend=backend)
    assert isinstance(model, DeviceModel)
    return model, backend


def requests(pair: Pair) -> list[Request]:
    """Images of several shapes, several in a prompt, and text without."""
    config = pair.model.config
    random = np.random.default_rng(3)
    made = []
    for seed, sizes in enumerate([[(90, 70)], [], [(40, 160), (64, 64)], [(300, 40)]]):
        pictures = [read_picture(png(noise(*size, seed)), config.vision, 70) for size in sizes]
        ids = random.integers(6, 500, 20).tolist()
        ids += [config.image_token_id, 7] * len(pictures) + random.integers(6, 500, 9).tolist()
        prompt = insert(ids, pictures, config)
        made.append(Request(prompt, replace(PARAMS, seed=seed), pictures))
    return made


@pytest.mark.parametrize("together", [4])
def test_tokens_are_those_of_the_cpu(
    tiny: Pair, fake: tuple[DeviceModel, FakeBackend], together: int
) -> None:
    wanted = requests(tiny)
    model, backend = fake
    before = len(backend.engines["vision"].calls)
    same(Generator(model, together).run(wanted), Generator(tiny.model, 1).run(wanted))
    calls = backend.engines["vision"].calls[before:]
    assert len({len(each.pixels) for made in wanted for each in made.pictures}) > 1
    assert [call.dims["9*soft_tokens"] for call in calls] == [9 * 70] * 4


def test_text_after_an_image_has_no_groups(
    tiny: Pair, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    """The groups of an earlier pass stay in memory, and must not be read again."""
    wanted = requests(tiny)
    for each in (wanted[0], wanted[1], wanted[3], wanted[1]):
        same(Generator(fake[0]).run([each]), Generator(tiny.model).run([each]))


def test_soft_tokens_are_those_of_the_cpu(
    tiny: Pair, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    picture = read_picture(png(noise(500, 300)), tiny.model.config.vision)
    assert picture.tokens > 200
    ours = fake[0].see(picture)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, tiny.model.see(picture), rtol=1e-4, atol=1e-4)


def test_no_image_meets_a_new_shape(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is killed loses one size at most."""
    backend = FakeBackend()
    model = open_model(tiny.graphs, check=False, backend=backend)
    calls, kept = backend.engines["vision"].calls, list[int]()
    monkeypatch.setattr(backend, "keep_compiled", lambda: kept.append(len(calls)))
    model.warm_up()
    assert kept[-len(BUDGETS) :] == list(range(1, len(BUDGETS) + 1))
    warm = {call.dims["9*soft_tokens"] for call in calls}
    calls.clear()
    for budget in BUDGETS:
        for width, height in ((90, 70), (300, 40), (64, 64), (41, 160)):
            picture = read_picture(png(noise(width, height)), tiny.model.config.vision, budget)
            model.see(picture)
    assert len(calls) == 12
    assert {call.dims["9*soft_tokens"] for call in calls} <= warm


def test_a_tower_with_a_narrow_profile_refuses_in_words(tiny: Pair) -> None:
    profiles = {"vision": [{"9*soft_tokens": {"min": 9, "opt": 90, "max": 90}}]}
    model = open_model(tiny.graphs, check=False, backend=FakeBackend(profiles))
    with pytest.raises(CanvasError, match="vision: no profile holds"):
        model.see(read_picture(png(noise(90, 70)), tiny.model.config.vision, 70))
