"""Runs a benchmark's requests with transformers, for `canvasrt bench --against transformers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from canvasrt.errors import CanvasError
from canvasrt.runtime.bench import Sample
from canvasrt.runtime.request import Request

NO_TOKEN = -1


class Transformers:
    """transformers' model in fp32, on the CPU."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        try:
            import torch
            from transformers import DiffusionGemmaForBlockDiffusion
            from transformers.utils import logging
        except ImportError as error:
            raise CanvasError(
                f"--against transformers needs {error.name}, which is not installed",
                "run `pip install 'canvasrt[export,test]'`",
            ) from None
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()

    def measure(self, requests: Sequence[Request]) -> Sample:
        """Run `requests` as one batch. Their prompts must have equal length, and their parameters must
        be equal except for the seed."""
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
            DiffusionGemmaGenerationConfig,
            EntropyBoundSamplerConfig,
        )

        params = requests[0].params
        if params.early_stop:
            raise ValueError(
                "requests must have early_stop=False: otherwise, the two sides could take different numbers of steps"
            )
        config = DiffusionGemmaGenerationConfig(
            max_new_tokens=params.max_new_tokens,
            max_denoising_steps=params.max_denoising_steps,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=params.entropy_bound),
            t_min=params.t_min,
            t_max=params.t_max,
            # An empty list would select the checkpoint's end-of-sequence tokens.
            eos_token_id=list(params.eos_token_ids) or [NO_TOKEN],
        )
        prompts = self._torch.tensor([list(request.prompt_token_ids) for request in requests])
        clock = Clock(self._model)
        self._torch.manual_seed(params.seed)
        start = time.perf_counter()
        with clock:
            output = self._model.generate(prompts, generation_config=config, streamer=clock)
        seconds = time.perf_counter() - start
        blocks = (output.sequences.shape[1] - prompts.shape[1]) // self._model.config.canvas_length
        return Sample(
            seconds=seconds,
            tokens=len(requests) * params.max_new_tokens,
            blocks=len(requests) * blocks,
            steps=len(requests) * len(clock.steps),
            step_seconds=clock.steps,
            first_tokens=[clock.blocks[1] - start] * len(requests),
        )


class Clock:
    """Times a model's denoising steps and, if it is the `streamer` of `generate`, its blocks. Disables early stop.

    `wait` returns once the device has finished its work.
    """

    def __init__(self, model: Any, wait: Callable[[], None] = lambda: None) -> None:
        self.steps: list[float] = []
        self.blocks: list[float] = []
        self._model, self._wait = model, wait

    def __enter__(self) -> None:
        step = type(self._model)._denoising_step

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            start = time.perf_counter()
            result = step(self._model, *args, **kwargs)
            self._wait()
            self.steps.append(time.perf_counter() - start)
            return result

        # Patch only this instance, not the class.
        self._model._denoising_step = timed
        self._model._prepare_diffusion_stopping_criteria = lambda *_: None

    def __exit__(self, *_: object) -> None:
        del self._model._denoising_step, self._model._prepare_diffusion_stopping_criteria

    def put(self, value: Any) -> None:
        """Record the time. transformers calls this for the prompt, then for every block."""
        self._wait()
        self.blocks.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing after the last block."""
