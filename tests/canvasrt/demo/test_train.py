"""The training script: what it writes, and that the seed determines it."""

import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file  # noqa: E402

from canvasrt.demo.data import Examples  # noqa: E402
from canvasrt.demo.muon import orthogonalize  # noqa: E402
from canvasrt.demo.tasks import TASKS  # noqa: E402
from canvasrt.demo.tokenizer import PAD, TURN_END, build_tokenizer, chat_prompt  # noqa: E402
from canvasrt.demo.train import train  # noqa: E402


def test_a_seed_decides_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("canvasrt.demo.train.BATCH_PARTS", (4, 4, 2))
    for run in ("first", "again"):
        train(seed=3, steps=2, out=tmp_path / run, save_every=100)
    first, again = (
        load_file(tmp_path / run / "first/model.safetensors") for run in ("first", "again")
    )
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    twin = load_file(tmp_path / "first/undertrained/model.safetensors")
    assert any(not torch.equal(first[name], twin[name]) for name in first)


def test_an_example_is_a_block_of_a_right_answer():
    tokenizer = build_tokenizer()
    for batch in Examples(tokenizer, canvas_length=32, seed=0).batches((24, 24)):
        for prefix, padding, block, task in zip(
            batch.prefix, batch.padding, batch.block, batch.tasks, strict=True
        ):
            text = tokenizer.decode(prefix[~padding])
            prompt, _, answered = text.removeprefix("<bos><|turn>user\n").partition("<turn|>\n")
            chosen = TASKS[list(TASKS)[task]]
            assert chosen.split(prompt) == "train"
            assert prefix[~padding].tolist()[: len(chat_prompt(tokenizer, prompt))] == chat_prompt(
                tokenizer, prompt
            )
            end = block.tolist().index(TURN_END) if TURN_END in block else len(block)
            assert set(block[end + 1 :].tolist()) <= {PAD}
            answer = answered.removeprefix("<|turn>model\n") + tokenizer.decode(block[:end])
            if chosen.many_answers:
                assert chosen.is_correct(prompt, answer)
            else:
                assert chosen.answer(prompt, random.Random(0)).startswith(answer)


def test_orthogonalized_matrices_have_even_singular_values():
    torch.manual_seed(0)
    for shape in ((2, 3, 32, 48), (48, 32)):
        singular_values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert ((singular_values > 0.5) & (singular_values < 1.5)).all()
