"""Opens a model on every GPU, and decides for all GPUs whether requests share passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from canvasrt.containers.triton.grammar import prepare_grammars
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def open_all(
    open_one: Callable[[int], Any], count: int, proves: bool
) -> tuple[list[Model], dict[str, Any]]:
    """Open a model on each of `count` GPUs, and warm it up.

    If `proves`, a test on every GPU decides: requests share passes if sharing changes no bits on any GPU. The second
    result is the test's `Evidence` as a dictionary, which is empty without a test. Models whose results differ in any
    bit from the first model's are left out: a seed's tokens must not depend on the GPU.
    """
    models, found = [], []
    for number in range(count):
        models.append(open_one(number))
        # Warm up before opening the next model, so that the next one can load the compiled kernels.
        found.append(_warmed_up(models[-1], proves))
    why = next((each["why"] for each in found if each and not each["shared"]), "")
    if not why:
        return _alike(models), found[0]
    log.warning("requests share no passes: %s", why)
    for model, each in zip(models, found, strict=True):
        if each["shared"]:
            model.share_passes(False)
            model.warm_up()
    return _alike(models), next(each for each in found if each and not each["shared"])


def prompt_encoder(model: Model) -> PromptEncoder:
    """Return the encoder of a model's prompts. Also prepares its grammars."""
    tokenizer = Tokenizer.load(model.bundle) if model.bundle.manifest.tokenizer else None
    if tokenizer is not None:
        prepare_grammars(model, tokenizer)
    return PromptEncoder(tokenizer, model.max_context)


def generator_maker(model: Model, max_batch: int, cache: int) -> Callable[[], Generator]:
    """Return a function that makes a model's next generator. `cache`: MiB to cache prompt prefixes in."""
    prefixes = PrefixCache(model, cache * 2**20)

    def make() -> Generator:
        prefixes.clear()  # a failed pass may have corrupted cached prefixes
        return Generator(model, max_batch, prefixes)

    return make


def _alike(models: list[Any]) -> list[Model]:
    """Return the models whose results for fixed requests have the same bits as the first model's."""
    if len(models) == 1:
        return models
    from canvasrt.runtime.gpu.sharing import digest

    first, *others = (digest(model) for model in models)
    for number, each in enumerate(others, 1):
        if each != first:
            log.warning(
                "GPU %d gets no requests: some bits of its results differ from those of GPU 0",
                number,
            )
    return [
        models[0],
        *(model for model, each in zip(models[1:], others, strict=True) if each == first),
    ]


def _warmed_up(model: Model, proves: bool) -> dict[str, Any]:
    """Warm up a model. If `proves`, and the model is on a GPU and batches several requests, also test whether requests
    can share passes. Return the test's evidence; empty without a test."""
    found = None
    if proves and model.rows_apart and (model.max_batch or 1) > 1:
        from canvasrt.runtime.gpu.device_model import DeviceModel
        from canvasrt.runtime.gpu.sharing import prove

        found = prove(model) if isinstance(model, DeviceModel) else None
    if found is not None:
        return asdict(found)
    model.warm_up()
    return {}
