"""Shared fixtures, such as the files of a small checkpoint, and a function that runs `canvasrt` as users do."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest_plugins = [
    f"tests.helpers.{each}"
    for each in ("certificates", "durations", "models", "one_caller", "serving")
]

# Under nohup, SIGHUP is ignored, and in the background of a script, SIGINT is. Processes started by tests would inherit
# this.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# ONNX Runtime reports usage unless this is set before its first import, and some tests import it directly.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# Every server that tests start gets one thread, since the workers of pytest-xdist already use all cores.
os.environ["CANVASRT_THREADS"] = "1"

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "diffusion_gemma_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "per_layer_config": {"1": {"head_dim": 32}},
    "sliding_window": 16,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "use_bidirectional_attention": "vision",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
CONFIG: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "canvas_length": 16,
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
}
GENERATION_CONFIG: dict[str, Any] = {
    "max_denoising_steps": 12,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
    "t_min": 0.3,
    "t_max": 0.9,
    "stability_threshold": 2,
    "confidence_threshold": 0.01,
    "eos_token_id": [1, 7],
}


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Builds and tests/helpers/library.py use a cache folder that all workers share, instead of the user's.

    It is new for every run unless CANVASRT_TEST_CACHE names a folder.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = os.environ.setdefault("CANVASRT_TEST_CACHE", str(shared / "kept"))
    os.environ["CANVASRT_CACHE"] = os.path.join(kept, "canvasrt-cache")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undo a command's changes to logging, since tests call `run` in their own process."""
    root, product = logging.getLogger(), logging.getLogger("canvasrt")
    before = [(each, each.level, list(each.handlers)) for each in (root, product)]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)


@pytest.fixture
def checkpoint_files(tmp_path: Path) -> Path:
    """A folder with the files of a checkpoint. The files are complete, but the weights are not those of a network."""
    from safetensors.numpy import save_file

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    save_file({"weight": np.arange(24, dtype=np.float32)}, folder / "model.safetensors")
    return folder


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def command() -> Command:
    """Return a function that runs `canvasrt` in a separate process, as users do."""

    def run(
        *arguments: object, timeout: float = 300, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            **kwargs.pop("env", {}),
        }
        return subprocess.run(
            [sys.executable, "-m", "canvasrt", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            **kwargs,
        )

    return run
