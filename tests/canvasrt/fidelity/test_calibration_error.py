"""Calibration error: figures are compared with their definitions, and fitted temperatures with known ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.fidelity.calibration_error import Scored, cross_fitted, fit_temperatures, summary
from canvasrt.fidelity.decisions import read_labelled, right_of
from canvasrt.runtime.answers.questions import read_questions, tempered


def choices(count: int, sharpness: float = 1.0, seed: int = 0) -> list[Scored]:
    """Return scored questions with three options. Probabilities are calibrated at a sharpness of 1."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        shares = random.dirichlet(np.ones(3))
        right = np.eye(3)[random.choice(3, p=shares)]
        found.append(Scored("choice", "", tempered(shares[None], 1 / sharpness), right))
    return found


def test_figures_are_those_of_their_definitions() -> None:
    random = np.random.default_rng(1)
    scored = choices(300, sharpness=2)
    scored += [
        Scored("predicate", "", random.dirichlet(np.ones(2), 4), np.eye(2)[random.integers(2)])
        for _ in range(100)
    ]
    found = summary(scored)
    bins: dict[int, list[tuple[float, float]]] = {}
    brier = loss = right = 0.0
    for each in scored:
        mean = each.draws.mean(0)
        truth = int(each.right.argmax())
        event = 0 if each.type == "predicate" else int(mean.argmax())
        bins.setdefault(int(mean[event] * 10), []).append((mean[event], float(truth == event)))
        brier += sum((p - (i == truth)) ** 2 for i, p in enumerate(mean)) / len(scored)
        loss -= np.log(mean[truth]) / len(scored)
        right += (truth == mean.argmax()) / len(scored)
    error = sum(
        len(pairs)
        / len(scored)
        * abs(np.mean([p for p, _ in pairs]) - np.mean([r for _, r in pairs]))
        for pairs in bins.values()
    )
    assert found["ece"] == pytest.approx(error)
    assert found["brier"] == pytest.approx(brier)
    assert found["log_loss"] == pytest.approx(loss)
    assert found["right"] == pytest.approx(right)
    assert [each["questions"] for each in found["bins"]] == [len(bins[i]) for i in sorted(bins)]
    assert found["distance"] is None


def test_a_certain_answer_is_in_the_last_bin() -> None:
    (last,) = summary([Scored("choice", "", np.eye(2)[:1], np.array([1.0, 0.0]))])["bins"]
    assert (last["from"], last["questions"]) == (0.9, 1)


def test_chance_explains_calibrated_probabilities_alone() -> None:
    good, sharp = summary(choices(2000)), summary(choices(2000, sharpness=2))
    assert good["ece"] <= good["ece_by_chance"]["p95"] < 0.05
    assert sharp["ece"] > 2 * sharp["ece_by_chance"]["p95"]


def test_known_probabilities_have_no_chance_in_them() -> None:
    shares = np.random.default_rng(2).dirichlet(np.ones(3), 50)
    exact = summary([Scored("score", "", each[None], each) for each in shares])
    assert exact["ece"] == pytest.approx(0, abs=1e-12)
    assert exact["ece_by_chance"]["p95"] == pytest.approx(0, abs=1e-12)
    assert exact["distance"] == pytest.approx(0, abs=1e-12)
    off = [Scored("score", "", each[None], np.roll(each, 1)) for each in shares]
    far = float(np.mean([np.abs(each - np.roll(each, 1)).sum() / 2 for each in shares]))
    assert summary(off)["distance"] == pytest.approx(far)


def test_a_fit_finds_the_temperature() -> None:
    scored = choices(600, sharpness=2.5)
    scored += [Scored("predicate", "", each.draws, each.right) for each in choices(600, seed=3)]
    found = fit_temperatures(scored)
    assert found["choice"] == pytest.approx(2.5, rel=0.1)
    assert found["predicate"] == pytest.approx(1, rel=0.1)
    kind = [each for each in scored if each.type == "choice"]
    assert summary(cross_fitted(kind))["ece"] < 0.4 * summary(kind)["ece"]


def test_a_fit_is_measured_on_questions_that_it_has_not_seen() -> None:
    scored = choices(2, sharpness=2)
    flipped = [scored[0], Scored("choice", "", scored[0].draws, 1 - scored[0].right)]
    (_, second) = cross_fitted(flipped)
    alone = fit_temperatures([scored[0]])["choice"]
    assert second.draws == pytest.approx(tempered(scored[0].draws, alone))


def test_best_brier_is_that_of_the_right_probabilities() -> None:
    scored = [Scored("choice", "", np.eye(2)[:1], np.array([0.3, 0.7])), *choices(3)]
    assert summary(scored[:1])["brier_at_best"] == pytest.approx(1 - 0.09 - 0.49)
    exact = [Scored("choice", "", each.right[None], each.right) for each in scored]
    assert summary(exact)["brier"] == pytest.approx(summary(scored)["brier_at_best"])


PREDICATE = {"type": "predicate", "instructions": "?"}
CHOICE = {"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "b"}]}


@pytest.mark.parametrize(
    ("question", "label", "right"),
    [
        (PREDICATE, {"answer": True}, [1, 0]),
        (PREDICATE, {"answer": False}, [0, 1]),
        (CHOICE, {"answer": "b"}, [0, 1]),
        (CHOICE, {"probabilities": [0.25, 0.75]}, [0.25, 0.75]),
    ],
)
def test_labels(question: dict, label: dict, right: list[float]) -> None:
    (read,) = read_questions([question])
    assert right_of(read, label, "questions[0]").tolist() == right


@pytest.mark.parametrize(
    ("question", "label", "message"),
    [
        (PREDICATE, {"answer": "yes"}, r"questions\[0\].answer is 'yes'"),
        (CHOICE, {"answer": "c"}, "answer is 'c'"),
        (CHOICE, {"probabilities": [1]}, "one number per option"),
        (CHOICE, {"probabilities": [0.5, 0.6]}, "do not add up to 1"),
        (CHOICE, {"probabilities": [float("nan"), 1]}, "do not add up to 1"),
    ],
)
def test_wrong_labels_are_named(question: dict, label: dict, message: str) -> None:
    (read,) = read_questions([question])
    with pytest.raises(CanvasError, match=message):
        right_of(read, label, "questions[0]")


def test_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    items = [{"input": "a\u2028b\x85c", "questions": []}] * 2
    lines = [json.dumps(each, ensure_ascii=False) + "\r\n" for each in items]
    (tmp_path / "labelled.jsonl").write_bytes("".join(lines).encode())
    found = read_labelled(tmp_path / "labelled.jsonl")
    assert [each["input"] for each in found] == ["a\u2028b\x85c"] * 2
