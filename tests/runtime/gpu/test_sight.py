"""Images on a device, with a fake engine: soft tokens are the same as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import BUDGETS, read_picture
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Pair


def test_soft_tokens_are_those_of_the_cpu(tiny: Pair) -> None:
    model = open_model(tiny.graphs, check=False, backend=FakeBackend())
    assert isinstance(model, DeviceModel)
    picture = read_picture(png(noise(500, 300)), tiny.model.config.vision)
    assert picture.tokens > 200
    ours = model.see(picture)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, tiny.model.see(picture), rtol=1e-4, atol=1e-4)


def test_no_image_meets_a_new_shape(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are also stored after each size, so a killed start loses at most one size."""
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
