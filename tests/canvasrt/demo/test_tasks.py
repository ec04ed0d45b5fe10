"""The demo's questions, how answers are judged, and the checkpoint's answers."""

import random

import pytest

from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.demo.tasks import TASKS, is_correct, questions, task_of


@pytest.mark.parametrize(
    ("prompt", "right", "wrong"),
    [
        ("12+34=", "46", "47"),
        ("12-34=", "-22", "22"),
        ("reverse planet", "tenalp", "planet"),
        ("sort 40172", "01247", "0124"),
        ("upper hello", "HELLO", "HELLo"),
        ("count 7 to 10", "7 8 9 10", "7 8 9 10 11"),
        ("shuffle abdeg", "gedba", "abdee"),
        ("shuffle abdeg", "dabge", "abde"),
        ("brackets 8", "([]){}[]", "([)]{}[]"),
        ("brackets 8 ([", "([]{()})", "[]([])()"),
        ("brackets 8 ([", "([])[]{}", "([])"),
        ("brackets 8", "(((())))", "(((()))"),
    ],
)
def test_an_answer_is_marked(prompt, right, wrong):
    assert is_correct(prompt, right)
    assert not is_correct(prompt, wrong)


def test_a_prompt_of_no_task_is_refused():
    with pytest.raises(ValueError, match="no task asks 'sing'; the tasks are add, "):
        task_of("sing")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_answers_made_for_training_are_right(task):
    rng = random.Random(1)
    for _ in range(300):
        prompt = task.draw(rng)
        assert task_of(prompt) is task
        assert task.is_correct(prompt, task.answer(prompt, rng))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_held_out_questions_are_never_trained_on(task):
    held_out = questions(task.name)
    assert len(held_out) >= 30
    assert len(set(held_out)) == len(held_out)
    rng = random.Random(2)
    trained_on = {task.key(task.draw_from("train", rng)) for _ in range(5000)}
    assert trained_on.isdisjoint(map(task.key, held_out))


@pytest.mark.parametrize("task", ["add", "count", "brackets"])
def test_a_listed_split_is_complete(task):
    every = set(TASKS[task].all_prompts())
    assert set(questions(task, "train")) | set(questions(task)) == every
    rng = random.Random(3)
    assert {TASKS[task].draw(rng) for _ in range(2000)} <= every


@pytest.fixture(scope="module")
def demo():
    """The demo checkpoint as users load it, in fp32."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.23")
    model = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        demo_checkpoint(), dtype="float32"
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(demo_checkpoint())


def test_the_chat_template_is_gemmas(demo):
    _, tokenizer = demo
    chat = [{"role": "user", "content": "12+34="}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><|turn>user\n12+34=<turn|>\n<|turn>model\n"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    end = tokenizer.convert_tokens_to_ids("<turn|>")
    assert end in demo[0].generation_config.eos_token_id


@pytest.mark.parametrize("task", TASKS)
def test_the_checkpoint_answers_held_out_questions(demo, task):
    import torch

    from bench.questions import generate

    torch.manual_seed(0)
    prompts = questions(task)[::7][:12]
    replies = generate(*demo, prompts)
    right = sum(is_correct(reply.prompt, reply.text) for reply in replies)
    assert right >= len(prompts) - (3 if TASKS[task].many_answers else 1)
