"""Compares denoising steps of bundle and reference. Both get the reference's canvases; each is self-conditioned on its
own previous step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from canvasrt.fidelity.capture import CapturedPass, captured
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.prompts import PromptSet
from canvasrt.fidelity.reference import ReferenceModel, ReferenceRow
from canvasrt.fidelity.stats import RelativeError, joined
from canvasrt.progress import report
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

COMPARED_STEPS = 12
PHASES = ("early", "middle", "late")
# For this many prompts, up to four passes are captured: the encoding, and the first, middle and last step.
CAPTURED_PROMPTS = 8
# With an entropy bound below zero, the head accepts no token, so its next canvas is the noise that it was given.
NOTHING = -1.0
# The number of positions whose logits are converted to float64 at a time: 32 MB of logits for the released model.
_POSITIONS = 16


@dataclass
class StepSeries:
    """The measurements of one or more steps at each position. `kl` is empty if no logits were recorded."""

    kl: list[np.ndarray] = field(default_factory=list)
    same: list[np.ndarray] = field(default_factory=list)
    entropy_error: list[np.ndarray] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the report's numbers; KL divergence and entropy are in nats."""
        same, error = joined(self.same), joined(self.entropy_error)
        kl = joined(self.kl) if self.kl else None
        return {
            "positions": int(same.size),
            "kl_mean": None if kl is None else float(kl.mean()),
            "kl_p99": None if kl is None else float(np.percentile(kl, 99, method="higher")),
            "argmax_agreement": float(same.mean()),
            "entropy_error_mean": float(error.mean()),
            "entropy_error_max": float(error.max()),
        }


@dataclass
class Steps:
    """The comparison of every step of every prompt, the passes that were captured, and the errors of the bundle's head
    on the reference's inputs."""

    prompts: int
    kind: str
    by_step: list[StepSeries]
    passes: list[CapturedPass] = field(default_factory=list)
    head: dict[str, RelativeError] = field(
        default_factory=lambda: {"logits": RelativeError(), "next_hidden": RelativeError()}
    )

    def phase(self, name: str) -> StepSeries:
        """Return the steps of one third of the trajectory."""
        return _joined(
            each for i, each in enumerate(self.by_step) if phase_of(i, len(self.by_step)) == name
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report's numbers for all steps together, for each third, and for each step."""
        return {
            "prompts": self.prompts,
            "prompt_kind": self.kind,
            "steps": len(self.by_step),
            "all": _joined(self.by_step).to_json(),
            "by_phase": {name: self.phase(name).to_json() for name in PHASES},
            "by_step": [each.to_json() for each in self.by_step],
        }


def phase_of(index: int, count: int) -> str:
    """Return the third of the trajectory that contains step `index` of `count`."""
    return PHASES[index * len(PHASES) // count]


def compare_steps(
    observed: ObservedModel,
    reference: ReferenceModel,
    prompts: PromptSet,
    most: int = COMPARED_STEPS,
) -> Steps:
    """Denoise one block after every prompt on both sides, without early stop, and compare each step."""
    count = max(len(PHASES), min(most, reference.sampler.max_denoising_steps))
    steps = Steps(len(prompts.tokens), prompts.kind, [StepSeries() for _ in range(count)])
    for seed, tokens in enumerate(prompts.tokens):
        params = SamplingParams.from_defaults(
            reference.sampler, reference.config, seed=seed, max_denoising_steps=count
        )
        capture = seed in _chosen(len(prompts.tokens))
        _compare_prompt(observed, reference, tokens, params, steps, capture)
    return steps


def _chosen(prompts: int) -> set[int]:
    """Return the numbers of the prompts to capture, which are evenly spaced."""
    count = min(CAPTURED_PROMPTS, prompts)
    return {i * prompts // count for i in range(count)}


def _compare_prompt(
    observed: ObservedModel,
    reference: ReferenceModel,
    tokens: Sequence[int],
    params: SamplingParams,
    steps: Steps,
    capture: bool,
) -> None:
    model, config = observed.model, reference.config
    row: Any = model.new_row()
    expected_row = reference.new_row()
    prompt = np.array(tokens, np.int64)
    for start in range(0, len(prompt), model.prefill_chunk):
        model.encode([EncodeInput(row, prompt[start : start + model.prefill_chunk])])
    with captured(reference, expected_row, "encode", steps.passes if capture else None):
        reference.encode([EncodeInput(expected_row, prompt)])
    canvas = step_noise(params.seed, 0, 0, config.canvas_length, config.vocab_size)[1]
    hidden, expected_hidden = model.first_hidden(canvas), reference.first_hidden(canvas)
    last = params.max_denoising_steps
    for step in range(1, last + 1):
        report("comparing denoising steps", params.seed * last + step - 1, steps.prompts * last)
        noise = step_noise(params.seed, 0, step, config.canvas_length, config.vocab_size)
        heat = params.temperature_at(step)
        wanted = capture and step in (1, (1 + last) // 2, last)
        given = DenoiseInput(expected_row, expected_hidden, heat, params.entropy_bound, *noise)
        with captured(reference, expected_row, "denoise", steps.passes if wanted else None):
            (expected,) = reference.denoise([given])
        given = DenoiseInput(row, hidden, heat, NOTHING, noise[0], expected.canvas)
        with observed.watching() as head:
            (out,) = model.denoise([given])
        series = steps.by_step[step - 1]
        series.same.append(out.argmax == expected.argmax)
        series.entropy_error.append(np.abs(out.entropy - expected.entropy))
        if head is not None:
            assert expected_row.logits is not None
            series.kl.append(divergence(expected_row.logits, head.logits[0]))
            if wanted:
                _compare_head(observed, reference, expected_row, given, steps)
        hidden, expected_hidden = out.next_hidden, expected.next_hidden
    report("comparing denoising steps", (params.seed + 1) * last, steps.prompts * last)
    model.release(row)


def _compare_head(
    observed: ObservedModel,
    reference: ReferenceModel,
    row: ReferenceRow,
    given: DenoiseInput,
    steps: Steps,
) -> None:
    """Run the bundle's head on the last layer's output in the latest captured pass, and add its errors to `steps`."""
    feeds = {
        "hidden": steps.passes[-1].out,
        "temperature": np.array([given.temperature], np.float32),
        "entropy_bound": np.array([given.entropy_bound], np.float32),
        "uniforms": given.uniforms[None],
        "noise": given.noise[None],
    }
    with observed.watching() as head:
        assert head is not None
        out = head.run(feeds)
    assert row.logits is not None
    steps.head["logits"].add(head.logits[0], row.logits.numpy())
    steps.head["next_hidden"].add(out["next_hidden"][0], reference.next_hidden(row))


def divergence(expected: Tensor, found: np.ndarray) -> np.ndarray:
    """Return KL(expected ‖ found) `[L]`, in nats, between the softmaxes of two arrays of logits `[L, V]`."""
    import torch

    parts = []
    for start in range(0, len(found), _POSITIONS):
        ours = torch.from_numpy(found[start : start + _POSITIONS]).double().log_softmax(-1)
        theirs = expected[start : start + _POSITIONS].double().log_softmax(-1)
        parts.append((theirs.exp() * (theirs - ours)).sum(-1))
    return torch.cat(parts).clamp_(min=0).numpy()


def _joined(series: Iterator[StepSeries] | list[StepSeries]) -> StepSeries:
    whole = StepSeries()
    for each in series:
        whole.kl += each.kl
        whole.same += each.same
        whole.entropy_error += each.entropy_error
    return whole
