"""The head in NumPy: scores any tokens at any positions, and computes the next hidden states of a canvas that the host
sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.bundle_facts import Table, host_dtype

# maximum number of rows of the embedding table to convert to float32 at a time
_ROWS = 1 << 15
_SIGNAL = ("signal_norm.weight", "signal_mlp.gate_up.weight", "signal_mlp.down.weight")


@dataclass(frozen=True)
class TokenScore:
    """A token's log-probability at temperature 1, in nats, and the likeliest tokens at its position.

    step: number of the denoising step that computed the distribution, counted from 1; 0 for tokens of the prompt. The
    prompt's first token has no log-probability.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    step: int


class HostHead:
    """Final norm, output projection and self-conditioning, in float32, over chosen tokens.

    Follows `DiffusionGemmaForBlockDiffusion.forward`. The cost is proportional to the number of scored tokens:
    a few labels cost next to nothing; the whole vocabulary costs a multiplication by the whole table.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, np.ndarray], table: Table
    ) -> None:
        """`table` is `[vocab_size, hidden_size]`; `weights` are the head's other weights, keyed by name."""
        self._eps = np.float32(config.rms_norm_eps)
        self._cap = np.float32(config.logit_softcap)
        # As in the reference, the scale is rounded to the table's dtype.
        self._scale = np.float32(table.dtype.type(config.hidden_size**0.5))
        self._weights = {name: np.asarray(each, np.float32) for name, each in weights.items()}
        self._table = table
        self._size = config.hidden_size
        self.vocab_size = config.vocab_size

    @classmethod
    def load(cls, bundle: Bundle, table: Table) -> HostHead:
        """Read the weights from a bundle. Raises CanvasError if the bundle has none."""
        entry = bundle.manifest.embedding.get("host_head")
        if not entry:
            raise CanvasError(
                f"{bundle.path} has no weights to score tokens on the host",
                "export and build the bundle again with this version",
            )
        flat = np.fromfile(bundle.file(entry["file"]), host_dtype(entry["dtype"]))
        sizes = [int(np.prod(each["shape"])) for each in entry["weights"]]
        pieces = np.split(flat, np.cumsum(sizes)[:-1])
        weights = {
            each["name"]: piece.reshape(each["shape"])
            for each, piece in zip(entry["weights"], pieces, strict=True)
        }
        return cls(bundle.manifest.model, weights, table)

    def logits(self, hidden: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        """Return the soft-capped logits, float32 `[n, k]`, of `tokens`, int64 `[k]`; by default, the whole vocabulary.

        `hidden` is the last layer's output, float32 `[n, hidden_size]`.
        """
        normed = _rms_norm(np.asarray(hidden, np.float32), self._eps) * self._weights["norm.weight"]
        tokens = np.arange(self.vocab_size) if tokens is None else tokens
        out = np.empty((len(normed), len(tokens)), np.float32)
        for begin in range(0, len(tokens), _ROWS):
            piece = self._rows(tokens[begin : begin + _ROWS])
            out[:, begin : begin + _ROWS] = self._capped(normed @ piece.T)
        return out

    def scores(
        self,
        hidden: np.ndarray,
        tokens: Sequence[int],
        top: int,
        step: int,
        listed: Sequence[int] = (),
    ) -> list[TokenScore]:
        """Return the scores of `tokens`. `hidden` is the last layer's output at their positions, float32 `[n,
        hidden_size]`. Every score also lists the log-probabilities of the `top` likeliest tokens. If `listed` is not
        empty, it lists the scored token and the tokens in `listed` instead."""
        logs = log_softmax(self.logits(hidden))
        found = []
        for row, token in zip(logs, map(int, tokens), strict=True):
            shown = dict.fromkeys((token, *listed)) if listed else _likeliest(row, top)
            best = tuple((int(each), float(row[each])) for each in shown)
            found.append(TokenScore(token, float(row[token]), best, step))
        return found

    def log_likelihoods(self, hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of `tokens` int64 `[n]` at temperature 1, float64 `[n]`.

        `hidden` is the last layer's output, float32 `[n, hidden_size]`.
        """
        normed = _rms_norm(np.asarray(hidden, np.float32), self._eps) * self._weights["norm.weight"]
        cap, total = np.float64(self._cap), np.zeros(len(normed), np.float64)
        for begin in range(0, self.vocab_size, _ROWS):
            piece = self._rows(np.arange(begin, min(begin + _ROWS, self.vocab_size)))
            # Logits do not exceed the cap, so the sums cannot overflow.
            total += np.exp(self._capped(normed @ piece.T) - self._cap).sum(-1, dtype=np.float64)
        own = self._capped(np.einsum("nd,nd->n", normed, self._rows(tokens)))
        return own.astype(np.float64) - cap - np.log(total)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Return scaled embeddings, float32 `[n, hidden_size]`, of int64 `tokens` `[n]`."""
        return self._rows(tokens) * self._scale

    def mean_embedding(
        self, probabilities: np.ndarray, tokens: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the scaled mean embeddings `[n, hidden_size]` of `tokens` `[k]`, weighted by `probabilities` `[n, k]`.
        By default, `tokens` is the whole vocabulary."""
        tokens = np.arange(self.vocab_size) if tokens is None else tokens
        out = np.zeros((len(probabilities), self._size), np.float32)
        for begin in range(0, len(tokens), _ROWS):
            piece = self._rows(tokens[begin : begin + _ROWS])
            out += probabilities[:, begin : begin + _ROWS] @ piece
        return out * self._scale

    def check_signal(self, way_out: str) -> None:
        """Raise CanvasError if the host lacks a weight that self-conditioning needs."""
        if not all(name in self._weights for name in _SIGNAL):
            raise CanvasError(
                "the checkpoint's self-conditioning weights are quantized, so the host cannot use them",
                way_out,
            )

    def next_hidden(self, canvas: np.ndarray, soft: np.ndarray) -> np.ndarray:
        """Return the next step's hidden states `[n, hidden_size]` of `canvas` int64 `[n]`, self-conditioned on the
        expected embeddings `soft` `[n, hidden_size]`."""
        norm, gate_up, down = (self._weights[name] for name in _SIGNAL)
        gate, up = np.split(_rms_norm(soft, self._eps) * norm @ gate_up.T, 2, axis=-1)
        signal = (_gelu(gate) * up) @ down.T
        return _rms_norm(self.embed(canvas) + signal, self._eps)

    def _rows(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self._table[tokens], np.float32)

    def _capped(self, raw: np.ndarray) -> np.ndarray:
        return np.tanh(raw / self._cap) * self._cap


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities over the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def _likeliest(row: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` tokens with the largest values, largest first. Of tokens with equal values, the lowest id
    comes first."""
    least = np.partition(row, -count)[-count] if count else np.inf
    few = np.flatnonzero(row >= least)  # sorting a whole vocabulary takes over ten times as long
    return few[np.argsort(-row[few], kind="stable")][:count]


def _rms_norm(x: np.ndarray, eps: np.float32) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + eps)


def _gelu(x: np.ndarray) -> np.ndarray:
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))
