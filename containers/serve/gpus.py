"""Chooses a server's GPUs: the first GPU that fits, or the GPU that `--device` names. With `--devices all`, all
fitting GPUs with the name of the first one are chosen.

CUDA_VISIBLE_DEVICES lists the UUIDs of the chosen GPUs, because CUDA numbers GPUs in another order: the fastest is 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from canvasrt import machine
from canvasrt.containers.names import GPUS_VARIABLE
from canvasrt.containers.serve.serving_profiles import ServingProfile
from canvasrt.containers.serve.settings import Settings
from canvasrt.errors import UsageError
from canvasrt.machine import VISIBLE, Gpu, named_gpus

log = logging.getLogger(__name__)


def check_gpus(settings: Settings) -> None:
    """Raise UsageError for `--device` and `--devices` that contradict each other."""
    if settings.devices not in (None, "all"):
        raise UsageError(
            f"--devices is {settings.devices!r}",
            "give --devices all, or choose one GPU with --device",
        )
    if settings.devices and settings.device:
        raise UsageError("--device and --devices are both set", "give only one of them")


def use_gpu(name: str) -> None:
    """Let this process and its children, including builds, use only one GPU. Raises UsageError if this machine has no
    such GPU."""
    there = machine.gpus()
    found = named_gpus(name, there) if "," not in name else []
    if not found or not found[0].uuid:
        known = "; ".join(f"{number}: {gpu.name}, {gpu.uuid}" for number, gpu in enumerate(there))
        raise UsageError(
            f"there is no GPU {name!r}", f"give the number or UUID of one of: {known or 'none'}"
        )
    os.environ[VISIBLE] = found[0].uuid


def gpus_of(settings: Settings, profile: ServingProfile) -> list[Gpu]:
    """Return the GPUs that serve: the first that fits and, with `--devices all`, all others that fit and have the same
    name. GPUs of another name could compute different bits."""
    fitting = profile.gpus(machine.gpus())
    if not settings.devices:
        return fitting[:1]
    same = [gpu for gpu in fitting if gpu.name == fitting[0].name]
    if len(same) < len(fitting):
        left = sorted({gpu.name for gpu in fitting} - {same[0].name})
        log.warning(
            "serving on every %s, but not on GPUs that may compute different bits: %s",
            same[0].name,
            ", ".join(left),
        )
    return same


def environment_of(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables that restrict Triton's processes to these GPUs. Returns no variables if there are no
    GPUs, or if this process is already restricted to a MIG instance, since `uuids` identify whole GPUs."""
    if not uuids or "MIG-" in os.environ.get(VISIBLE, ""):
        return {}
    return {VISIBLE: ",".join(uuids), GPUS_VARIABLE: str(len(uuids))}
