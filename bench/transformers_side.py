"""Measures Hugging Face transformers with the same weights."""

from __future__ import annotations

import copy
from typing import Any

from bench.runner import WARM_UP, Routing
from bench.shape import Prepared
from canvasrt.cli.against import NO_TOKEN, Clock
from canvasrt.extras import require
from canvasrt.runtime.bench import random_prompts


class TransformersRunner:
    """The model of transformers, run by its `generate`."""

    def __init__(self, prepared: Prepared) -> None:
        self._torch: Any = require("torch", "export")
        require("transformers", "test")
        self._config = prepared.config
        self._cuda = self._torch.cuda.is_available()
        self._device = "cuda" if self._cuda else "cpu"
        if self._cuda:
            self._torch.cuda.reset_peak_memory_stats()
        self._model = repeated_model(prepared, self._torch, self._device)

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        """Return milliseconds of passes, as `DeviceRunner.pass_ms` does. The result is empty unless routing is `even`,
        since `generate` draws the canvases itself."""
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
            DiffusionGemmaGenerationConfig,
            EntropyBoundSamplerConfig,
        )

        if routing != "even":
            return []
        config = DiffusionGemmaGenerationConfig(
            max_new_tokens=self._config.canvas_length,
            max_denoising_steps=WARM_UP + repeats,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
            t_min=0.4,
            t_max=0.8,
            eos_token_id=[NO_TOKEN],
        )
        ids = self._torch.tensor(random_prompts(self._config, batch, context)).to(self._device)
        clock = Clock(self._model, self._wait)
        with clock:
            self._model.generate(ids, generation_config=config, streamer=clock)
        return [1e3 * seconds for seconds in clock.steps[WARM_UP:]]

    def memory(self) -> int | None:
        """Return the peak bytes of device memory in use; None on a CPU."""
        return int(self._torch.cuda.max_memory_allocated()) if self._cuda else None

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def repeated_model(prepared: Prepared, torch: Any, device: str) -> Any:
    """Return transformers' model of the checkpoint with its layers repeated. Each copy has its own memory."""
    from transformers import AutoConfig, DiffusionGemmaForBlockDiffusion
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the checkpoint lacks only the vision tower's weights
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[prepared.shape.precision]
    # The checkpoint has no vision tower. Without this, transformers would create one of 550M parameters.
    config = AutoConfig.from_pretrained(prepared.checkpoint)
    config.vision_config = type(config.vision_config)(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
    )
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        prepared.checkpoint, config=config, dtype=dtype
    )
    model = model.eval().to(device)
    copies, layers = prepared.shape.copies, prepared.shape.layers
    stacks = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
        and len(module.layers) == layers
    ]
    first = [list(stack.layers) for stack in stacks]
    for number in range(1, copies):
        # One `deepcopy` call for encoder and decoder, so that their copies share weights, too.
        for stack, copied in zip(stacks, copy.deepcopy(first), strict=True):
            for layer in copied:
                for module in layer.modules():
                    if hasattr(module, "layer_idx"):
                        module.layer_idx += number * layers
                stack.layers.append(layer)
    seen: set[int] = set()
    for module in (model, *model.modules()):
        for config in (getattr(module, "config", None), getattr(module, "text_config", None)):
            text = getattr(config, "text_config", config)
            if text is not None and hasattr(text, "layer_types") and id(text) not in seen:
                seen.add(id(text))
                _repeat(text, copies)
    return model


def _repeat(text: Any, copies: int) -> None:
    """Multiply the number of layers of a text configuration by `copies`."""
    before = text.num_hidden_layers
    text.layer_types = list(text.layer_types) * copies
    text.num_hidden_layers = before * copies
    known = getattr(text, "per_layer_config", None)
    if isinstance(known, dict):
        text.per_layer_config = {
            type(key)(int(key) + number * before): value
            for number in range(copies)
            for key, value in list(known.items())
        }
