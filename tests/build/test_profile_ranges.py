"""The ranges of sizes in the optimization profiles of engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canvasrt.build.profile_ranges import profiles, to_json
from canvasrt.engine_profiles import Profiles
from canvasrt.expert_slots import usual_capacity
from canvasrt.pass_shapes import plan_passes
from canvasrt.roofline.predict import CallSizes
from tests.helpers.configs import RELEASED

BODY = {"name": "body_0", "layers": [0, 1, 2, 3, 4, 5]}
HEAD = {"name": "head"}


def test_profiles_of_the_released_model() -> None:
    made = profiles(BODY, RELEASED, plan_passes(RELEASED, 32_768, 4))
    found = {
        name: {key: (size.min, size.opt, size.max) for key, size in sizes.items()}
        for name, sizes in made.items()
    }
    past = {"octets_full": (1, 256, 4096), "octets_sliding": (1, 128, 128)}
    # The number of requests, the tokens per request, and the rows per expert.
    for name, batch, length, rows in (
        ("encode", 1, (1, 512, 512), (1, 80, 256)),
        ("denoise", 1, (256, 256, 256), (1, 48, 256)),
        ("denoise_batch", 4, (256, 256, 256), (1, 128, 128)),
    ):
        assert found.pop(name) == {
            "batch": (batch, batch, batch),
            "length": length,
            "capacity": rows,
            "gate_rows": rows,
            "gate_queues": (128, 128, 128),
            **past,
        }
    assert not found
    head = profiles(HEAD, RELEASED, plan_passes(RELEASED, 32_768, 4))
    assert list(head) == ["denoise", "denoise_batch", "denoise_small"]
    assert to_json(head)[2]["length"] == {"min": 32, "opt": 64, "max": 128}
    assert all(made["encode"]["length"].holds(size) for size in (32, 64, 128))
    assert to_json(head)[0] == {
        "name": "denoise",
        "batch": {"min": 1, "opt": 1, "max": 1},
        "length": {"min": 256, "opt": 256, "max": 256},
    }


def test_a_body_has_what_its_passes_and_layers_need() -> None:
    alone = profiles({**BODY, "layers": [0, 1]}, RELEASED, plan_passes(RELEASED, 4096, 1))
    assert list(alone) == ["encode", "denoise"]
    assert all("octets_sliding" in each and "octets_full" not in each for each in alone.values())
    odd = profiles(BODY, RELEASED, plan_passes(RELEASED, 4100, 1))["encode"]
    assert (8 * odd["octets_full"].max, 8 * odd["octets_sliding"].max) == (4160, 1024)
    # With a chunk of 256, prompts are read one canvas at a time.
    short = profiles(BODY, RELEASED, plan_passes(RELEASED, 8192, 1, 256))["encode"]
    assert short["length"].max == short["capacity"].max == short["capacity"].opt == 256


def test_experts_have_the_slots_that_passes_ask_for() -> None:
    """An expert has enough slots for even routing; for one request of up to 256 tokens, it has one slot per token."""
    small = replace(RELEASED, num_experts=4, top_k_experts=2)
    found = {
        n: p["capacity"].max for n, p in profiles(BODY, small, plan_passes(small, 4096, 4)).items()
    }
    assert found == {"encode": 384, "denoise": 256, "denoise_batch": 704}
    assert profiles(BODY, RELEASED, plan_passes(RELEASED, 300, 1))["encode"]["capacity"].max == 256
    assert usual_capacity(RELEASED, 8) == 8


def test_a_lone_canvas_in_nvfp4_feeds_all_tokens_to_every_expert() -> None:
    packed = {**BODY, "quantized": {"layers.0.experts.gate_up": "nvfp4"}}
    made = profiles(packed, RELEASED, plan_passes(RELEASED, 32_768, 4))
    rows = {
        name: (sizes["gate_rows"].max, sizes["gate_queues"].max) for name, sizes in made.items()
    }
    assert rows == {"encode": (256, 128), "denoise": (256, 1), "denoise_batch": (128, 128)}


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("context", [1024, 32_768, 262_144])
def test_every_canvas_takes_the_program_that_is_built_for_canvases(form: str, context: int) -> None:
    """This holds for any number of slots. Programs for variable numbers of tokens have more kernels."""
    entry = {**BODY, "quantized": {"layers.0.experts.gate_up": form}}
    passes = plan_passes(RELEASED, context, 1)
    made = to_json(profiles(entry, RELEASED, passes))
    picked: dict[int, set[str]] = {}
    for shape in passes:
        sizes = CallSizes(shape.batch, shape.length, shape.width, shape.capacity)
        tokens = form == "nvfp4" and shape.length == RELEASED.canvas_length
        number = Profiles(made).pick(sizes.dims(RELEASED, passes, shared=tokens))
        assert number is not None
        picked.setdefault(shape.length, set()).add(made[number]["name"])
    assert picked.pop(256) == {"denoise"}
    assert set.union(*picked.values()) == {"encode"}
