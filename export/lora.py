"""PEFT LoRA adapters, merged into a checkpoint's weights as they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canvasrt.checkpoints.locate import check_adapter, read_json
from canvasrt.checkpoints.weight_names import DECODER, ENCODER
from canvasrt.defaults import ADAPTER_FILES
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint, Shard
from canvasrt.export.weights import check_finite
from canvasrt.hashes import hash_files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = ADAPTER_FILES

_HINT = "merge it with PEFT's merge_and_unload(), save the whole checkpoint, and export that"
# Settings under which a LoRA does more than add B A to each of the weights that it names.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "lora_bias": "LoRA with a bias",
    "fan_in_fan_out": "transposed weights",
    "modules_to_save": "modules saved whole",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
}
# Initialisations of an adapter that change the base model's weights. (PEFT can save such an adapter as a plain LoRA.)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TABLE = ("embed_tokens", "lm_head")
# Prefixes of the text stack's names. Tools that do not distinguish encoder and decoder write `model.`.
_STACKS = (f"{ENCODER}.", f"{DECODER}.", "model.")
_OURS = ("model.encoder.", f"{DECODER}.")


@dataclass(frozen=True)
class Delta:
    """An adapter's change to one tensor: `alpha / rank · B A` is added; for experts, `alpha / rank · B[e] A[e]` is
    added to expert e. If `root` is true, rank is replaced by √rank."""

    file: Shard
    module: str
    alpha: float
    root: bool

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.file.tensors[self._name("A")].shape, self.file.tensors[self._name("B")].shape

    def add_to(self, chunk: Tensor, first: int, total: int) -> None:
        """Add the delta to `chunk` in place, in float32. `chunk` starts at row `first` of a tensor with `total`
        rows."""
        a, b = (self.file.read(self._name(each)).to(torch.float32) for each in "AB")
        rank = len(a) if chunk.dim() == 2 else len(a) // total
        scale = self.alpha / (math.sqrt(rank) if self.root else rank)
        if chunk.dim() == 2:
            chunk.addmm_(b[first : first + len(chunk)], a, alpha=scale)
            return
        # PEFT's layout: A is ordered by expert, then rank; B by rank, then expert.
        a = a.view(total, -1, a.shape[-1])
        b = b.view(len(b), -1, total)
        for expert, weight in enumerate(chunk, first):
            weight.addmm_(b[:, :, expert], a[expert], alpha=scale)

    def _name(self, part: str) -> str:
        return f"{self.module}.lora_{part}.weight"


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder and factor, and its deltas, keyed by the names of the checkpoint's tensors."""

    path: Path
    weight: float
    deltas: dict[str, list[Delta]]

    def to_json(self) -> dict[str, Any]:
        """Return the adapter's entry in the manifest."""
        return {
            "files": hash_files(self.path, ADAPTER_FILES),
            "weight": self.weight,
        }


class Adapted(Checkpoint):
    """A checkpoint whose weights include adapters: `W` plus all deltas, summed in float32."""

    def __init__(self, path: Path, adapters: Sequence[Adapter]) -> None:
        """Open the checkpoint. Raises `CanvasError` for an adapter that does not fit it."""
        super().__init__(path)
        self._adapters = list(adapters)
        for adapter in self._adapters:
            for name, deltas in adapter.deltas.items():
                for delta in deltas:
                    self._check(adapter, name, delta)

    def read(self, name: str) -> Tensor:
        return torch.cat(list(self.chunks(name))).view(self.shape(name))

    def chunks(self, name: str) -> Iterator[Tensor]:
        deltas = [each for adapter in self._adapters for each in adapter.deltas.get(name, ())]
        first = 0
        for chunk in super().chunks(name):
            if deltas:
                check_finite(chunk, name, self.file(name))
                chunk = chunk.to(torch.float32, copy=True)
            for delta in deltas:
                delta.add_to(chunk, first, self.shape(name)[0])
                check_finite(chunk.bfloat16(), f"{name} with {delta.module}", delta.file.file)
            yield chunk
            first += len(chunk)

    def _check(self, adapter: Adapter, name: str, delta: Delta) -> None:
        other = f"{adapter.path} is for a base model other than {self.path}"
        hint = "name the adapter's own base checkpoint"
        if name not in self:
            raise CanvasError(f"{other}: {self.path} has no {name}", hint)
        shape = self.shape(name)
        a, b = delta.shapes
        experts = shape[0] if len(shape) == 3 else 1
        fits = a[1:] == shape[-1:] and b[:1] == shape[-2:-1] and a[0] == b[1] and not a[0] % experts
        if not fits:
            raise CanvasError(
                f"{other}: {name} has shape {shape}, but the adapter's lora_A has {a} and lora_B has {b}",
                hint,
            )


def load_adapter(path: str | Path, weight: float = 1.0) -> Adapter:
    """Read an adapter's configuration and its tensors' names. `weight` scales all deltas.

    Encoder and decoder share their text weights in the graphs, as in transformers. If an adapter has deltas for both,
    both are added, as PEFT's merge does. Raises `CanvasError` for a folder without an adapter, and for an adapter that
    cannot be merged.
    """
    folder = Path(path).expanduser()
    check_adapter(folder)
    config = _read_config(folder)
    shard = Shard(folder / ADAPTER_WEIGHTS)
    if not math.isfinite(weight):
        raise CanvasError(f"the weight of adapter {folder} is {weight}", "give a finite number")
    deltas: dict[str, list[Delta]] = {}
    for name in shard.tensors:
        _check_known(folder, name, shard)
        check_finite(shard.read(name), name, shard.file)
        module = name.removesuffix(".lora_A.weight")
        if module != name:
            tensor, delta = _delta(shard, module, config, weight)
            deltas.setdefault(tensor, []).append(delta)
    if not deltas:
        raise CanvasError(
            f"{folder / ADAPTER_WEIGHTS} contains no LoRA weights", "give a PEFT LoRA adapter"
        )
    return Adapter(folder, weight, deltas)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    config = read_json(file)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CanvasError(f"{file} describes a {kind!r} adapter; only LORA can be merged", _HINT)
    found = [what for key, what in _UNSUPPORTED.items() if config.get(key)]
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        found.append(f"base weights changed by {init!r}")
    if config.get("bias", "none") != "none":
        found.append("trained biases")
    if found:
        raise CanvasError(f"{file}: {', '.join(found)}: canvasrt only merges plain LoRA", _HINT)
    return config


def _check_known(folder: Path, name: str, shard: Shard) -> None:
    if any(f".{table}." in f".{name}" for table in _TABLE):
        raise CanvasError(
            f"{folder / ADAPTER_WEIGHTS} adapts {name}, but the embedding table cannot be adapted: it is also"
            " the output projection, and the host reads it",
            _HINT,
        )
    partner = name.replace(".lora_B.weight", ".lora_A.weight")
    if not partner.endswith(".lora_A.weight"):
        raise CanvasError(
            f"{folder / ADAPTER_WEIGHTS} contains {name}, which is not a LoRA of a matrix product",
            _HINT,
        )
    if partner not in shard.tensors:
        raise CanvasError(
            f"{folder / ADAPTER_WEIGHTS} has {name} without its lora_A", "fetch the adapter again"
        )


def _delta(shard: Shard, module: str, config: dict[str, Any], weight: float) -> tuple[str, Delta]:
    """Return the name of the tensor that a module's LoRA changes, and the delta."""
    if f"{module}.lora_B.weight" not in shard.tensors:
        raise CanvasError(f"{shard.file} has no {module}.lora_B.weight", "fetch the adapter again")
    key = module.removeprefix("base_model.model.")
    plain = re.sub(r"(\.base_layer)+$", "", key)
    if plain.endswith(".experts"):
        key = f"{plain}.{_expert_parameter(shard, module, config)}"
        target = _ours(key)
    else:
        target = f"{_ours(key)}.weight"
    alpha = _alpha(config, key) * weight
    return target, Delta(shard, module, alpha, bool(config.get("use_rslora")))


def _expert_parameter(shard: Shard, module: str, config: dict[str, Any]) -> str:
    """Return the batched expert weight that a LoRA changes.

    PEFT wraps gate_up_proj first, so the last parameter's wrapper is outermost. Each `.base_layer` in `module` leads
    one wrapper further in.
    """
    names = {str(each).rpartition(".")[2] for each in config.get("target_parameters") or ()}
    both = [name for name in ("gate_up_proj", "down_proj") if name in names]
    inner = module.count(".base_layer")
    if inner >= len(both):
        raise CanvasError(
            f"{shard.file} has a LoRA for {module}, which target_parameters does not list",
            "fetch the adapter again",
        )
    return both[len(both) - 1 - inner]


def _ours(key: str) -> str:
    """Return a module's or parameter's name in the checkpoint. Text weights get the decoder's prefix."""
    for stack in _STACKS:
        if key.startswith(stack) and not (stack == "model." and key.startswith(_OURS)):
            return f"{DECODER}.{key[len(stack) :]}"
    return key


def _alpha(config: dict[str, Any], key: str) -> float:
    """Return alpha by PEFT's rule: the value of the first pattern that matches the end of the module's name, or else
    the default."""
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return float(value)
    return float(config.get("lora_alpha", 8))
