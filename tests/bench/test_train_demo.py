"""The training of the demo: its files, its reproducibility by seed, and its examples."""

import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file  # noqa: E402

from bench.__main__ import main  # noqa: E402
from bench.demo.data import Examples  # noqa: E402
from bench.demo.mixture import Mixture  # noqa: E402
from bench.demo.model import FastForward, add_sight, build_model  # noqa: E402
from bench.demo.muon import orthogonalize  # noqa: E402
from bench.demo.tokenizer import PAD, TURN_END_ID, build_tokenizer, chat_prompt  # noqa: E402
from bench.demo.train import VisionRun  # noqa: E402
from canvasrt.checkpoints.locate import demo_checkpoint  # noqa: E402
from canvasrt.demo.tasks import TASKS  # noqa: E402
from tests.helpers.reference import Reference  # noqa: E402
from tests.helpers.restricted import cache_of  # noqa: E402

pytestmark = pytest.mark.acceptance
SMALL = VisionRun(seed=3, steps=2, stop=1, old=(2, 2), plain=2, closed=2, pictures=(1, 1))


def test_a_seed_decides_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.demo.train.BATCH_PARTS", (4, 4, 2))
    monkeypatch.setattr("bench.demo.train.VISION_RUNS", (SMALL, SMALL))
    for run in ("first", "again"):
        line = ["train-demo", "--seed", "3", "--steps", "2", "--threads", "1"]
        assert main([*line, "-o", str(tmp_path / run)]) == 0
    for name in ("checkpoint", "checkpoint-vision"):
        first, again = (
            load_file(tmp_path / run / name / "model.safetensors") for run in ("first", "again")
        )
        assert first.keys() == again.keys()
        assert all(torch.equal(first[each], again[each]) for each in first)
    start = load_file(tmp_path / "first/checkpoint/model.safetensors")
    twin = load_file(tmp_path / "first/undertrained/model.safetensors")
    assert any(not torch.equal(start[name], twin[name]) for name in start)
    moved = {n for n in first if n not in start or not torch.equal(first[n], start[n])}
    assert any("experts" in name for name in moved)
    folder = tmp_path / "first/checkpoint-vision"
    model = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder)
    table = model.model.encoder.vision_tower.patch_embedder.position_embedding_table
    assert table[:, :24].abs().max() > 0  # rows for positions of patches are trained
    assert (folder / "preprocessor_config.json").is_file()


def test_a_picture_in_training_is_the_stock_one():
    """Training computes the same logits as transformers. Soft tokens see each other, and prefixes are padded."""
    torch.manual_seed(0)
    model = add_sight(build_model()).eval()
    forward = FastForward(model)
    batch = Mixture(build_tokenizer(), 32, 0).pictures(2, 1, 70)[0]
    features = forward.see(batch.pixels, batch.places, return_dict=True).pooler_output
    canvas = torch.randint(112, (2, 32))
    fast, _ = forward.denoise(canvas, forward.encode(batch.prefix, batch.padding, features))
    reference = Reference(model)
    for row in range(2):
        ids = batch.prefix[row][~batch.padding[row]]
        seen = {
            "pixel_values": batch.pixels[row, None],
            "image_position_ids": batch.places[row, None],
        }
        cache = cache_of(reference, ids.tolist(), seen)
        stock = model(decoder_input_ids=canvas[row, None], past_key_values=cache).logits[0]
        torch.testing.assert_close(fast[row], stock, atol=1e-4, rtol=1e-4)


def test_targets_are_the_known_probabilities():
    mixture = Mixture(build_tokenizer(), 32, 0)
    for batch in (*mixture.plain(20), *mixture.closed(20), *mixture.pictures(4, 4, 70)):
        torch.testing.assert_close(batch.targets.sum(-1), torch.ones(len(batch.block), 32))
        right = batch.targets.gather(-1, batch.block[..., None])[..., 0]
        assert (right[~batch.slots] == 1).all()
        assert (right > 0).all()  # only possible outcomes are drawn


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
            end = block.tolist().index(TURN_END_ID) if TURN_END_ID in block else len(block)
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


def test_the_fast_forward_pass_is_the_stock_one():
    """The prefix is longer than the sliding window and has padding, and the second step is self-conditioned."""
    model = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        demo_checkpoint(), dtype="float32"
    ).eval()
    forward = FastForward(model)
    torch.manual_seed(0)
    for length in (20, 63, 64, 65, 100):
        prefix, canvas = torch.randint(112, (2, length)), torch.randint(112, (2, 32))
        signal = 3 * torch.randn(2, 32, 112)
        padded = torch.nn.functional.pad(prefix, (5, 0))
        padding = torch.arange(length + 5).expand(2, -1) < 5
        with torch.no_grad():
            stock = model(
                input_ids=prefix, decoder_input_ids=canvas, self_conditioning_logits=signal
            ).logits
            fast, _ = forward.denoise(canvas, forward.encode(padded, padding), signal)
        torch.testing.assert_close(fast, stock, atol=1e-4, rtol=1e-4)
