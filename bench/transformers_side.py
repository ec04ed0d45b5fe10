"""The other side: Hugging Face transformers on the same weights, eager, or compiled over a static cache."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np

from bench.runner import WARM_UP, Generation, Routing
from bench.shape import Prepared
from canvasrt.cli.against import NO_TOKEN, Clock
from canvasrt.extras import require
from canvasrt.runtime.bench import random_prompts


class TransformersRunner:
    """transformers' own model and `generate`. With a `static` cache, it compiles itself."""

    def __init__(self, prepared: Prepared, static: bool) -> None:
        self._torch: Any = require("torch", "export")
        require("transformers", "test")
        self._static, self._config = static, prepared.config
        self._cuda = self._torch.cuda.is_available()
        self._device = "cuda" if self._cuda else "cpu"
        if self._cuda:
            self._torch.cuda.reset_peak_memory_stats()
        self._model = repeated_model(prepared, self._torch, self._device)
        self._loads: list[int] = []
        self._loads_of: dict[str, int] = {}
        _watch_routers(self._model, self._loads_of, prepared.config.num_experts)

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        if routing != "even":
            return []
        # Compiling happens in a first run, which does not count.
        for _ in range(1 + self._static):
            found = self.generate(batch, context, 1, WARM_UP + repeats)
        return [1e3 * seconds for seconds in found.step_seconds[WARM_UP:]]

    def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
        return {}

    def generate(self, batch: int, prompt: int, blocks: int, steps: int) -> Generation:
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
            DiffusionGemmaGenerationConfig,
            EntropyBoundSamplerConfig,
        )

        new = blocks * self._config.canvas_length
        config = DiffusionGemmaGenerationConfig(
            max_new_tokens=new,
            max_denoising_steps=steps,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
            t_min=0.4,
            t_max=0.8,
            eos_token_id=[NO_TOKEN],
            **({"cache_implementation": "static"} if self._static else {}),
        )
        ids = self._torch.tensor(random_prompts(self._config, batch, prompt)).to(self._device)
        clock = Clock(self._model, self._wait)
        begin = time.perf_counter()
        with clock:
            self._model.generate(ids, generation_config=config, streamer=clock)
            self._wait()
        seconds = time.perf_counter() - begin
        first = clock.blocks[1] - begin
        return Generation(batch * new, seconds, first, tuple(clock.steps))

    def memory(self) -> int | None:
        return int(self._torch.cuda.max_memory_allocated()) if self._cuda else None

    def loads(self) -> list[int]:
        return list(self._loads_of.values())

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def repeated_model(prepared: Prepared, torch: Any, device: str) -> Any:
    """Return transformers' model of the checkpoint with its layers repeated, each copy with its own
    memory."""
    from transformers import AutoConfig, DiffusionGemmaForBlockDiffusion
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the checkpoint lacks only the vision tower's weights
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[prepared.shape.precision]
    # The checkpoint has no vision tower, and the reference would create one of 550M parameters.
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
        # One memo for all copies, since encoder and decoder share their weights.
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
    """Give a text configuration `copies` times as many layers."""
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


def _watch_routers(model: Any, loads: dict[str, int], experts: int) -> None:
    """Record, per decoder layer, the most tokens given to one expert in the last pass."""

    def note(name: str, output: Any) -> None:
        for each in output if isinstance(output, tuple) else (output,):
            if not each.dtype.is_floating_point and each.dim() >= 2:
                counts = np.bincount(each.detach().cpu().numpy().reshape(-1), minlength=experts)
                loads[name] = int(counts.max())

    import torch

    for name, module in model.named_modules():
        if type(module).__name__ == "DiffusionGemmaTextRouter" and "decoder" in name:

            def hook(_: Any, __: Any, output: Any, name: str = name) -> None:
                # Copying to the host would break a compiled graph.
                if name not in loads and not torch.compiler.is_compiling():
                    note(name, output)

            module.register_forward_hook(hook)
