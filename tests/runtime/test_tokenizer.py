"""The tokenizer of a bundle agrees with transformers for the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer

from canvasrt.checkpoints.locate import DEMO_FOLDER, demo_checkpoint
from canvasrt.errors import CanvasError
from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer

CHATS = [
    [{"role": "user", "content": "12+34="}],
    [{"role": "user", "content": "  spaces & <specials|>\n<"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "again"}]},
    ],
]


@pytest.fixture(scope="module")
def reference(demo):
    return AutoTokenizer.from_pretrained(demo.checkpoint)


@pytest.mark.parametrize("chat", CHATS, ids=["user", "specials", "turns"])
def test_chats(demo, reference, chat: list[dict]) -> None:
    text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert demo.tokenizer.render_chat(chat) == text
    assert demo.tokenizer.encode_chat(chat) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ["", "abc", "a\nb", "é 漢 🙂", "<bos>x"])
def test_text(demo, reference, text: str) -> None:
    ids = demo.tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert demo.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert demo.tokenizer.decode(ids, False) == reference.decode(ids)


def test_pieces_of_a_stream_add_up(demo) -> None:
    ids = demo.tokenizer.encode("count 7 to 31", add_special_tokens=False)
    decoder = StreamDecoder(demo.tokenizer)
    pieces = [decoder.put(ids[:4]), decoder.put(ids[4:9]), decoder.put(ids[9:], final=True)]
    assert "".join(pieces) == "count 7 to 31"
    assert all(pieces)


def test_a_character_cut_in_two_waits_for_its_rest() -> None:
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(core, None)
    ids = tokenizer.encode("a🙂b")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.put([token]) for token in ids] == ["a", "", "", "", "🙂", "b"]
    cut = StreamDecoder(tokenizer)
    assert cut.put(ids[:3]) == "a"
    assert cut.put([], final=True).startswith("\ufffd")


def test_a_template_cannot_reach_python() -> None:
    from jinja2.exceptions import SecurityError
    from tokenizers import models

    hostile = Tokenizer(Core(models.BPE()), "{{ ''.__class__.__mro__ }}{{ [].append(1) }}")
    with pytest.raises(CanvasError) as error:
        hostile.render_chat([])
    assert isinstance(error.value.__cause__, SecurityError)


def test_the_demo_takes_tools_and_reads_nothing_of_them(demo) -> None:
    """The demo was not trained on tools, so its template ignores them."""
    question = {"role": "user", "content": "12+34="}
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    turns = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "46"},
    ]
    core = Core.from_file(str(demo.checkpoint / "tokenizer.json"))
    template = (demo.checkpoint / "chat_template.jinja").read_text("utf-8")
    tokenizer = Tokenizer(core, template, {"bos_token": "<bos>"})
    ids, _ = tokenizer.open_chat(turns, {"tools": [{"function": call["function"]}]})
    assert ids == tokenizer.encode_chat([question])


def test_what_a_template_refuses_is_told() -> None:
    from tokenizers import models

    strict = Tokenizer(Core(models.BPE()), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CanvasError, match="roles must alternate"):
        strict.render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(CanvasError, match="template does not support"):
        strict.open_chat([{"role": "assistant", "tool_calls": [{"id": "1"}]}], {})


def test_bundles_without_a_tokenizer_and_tokenizers_without_a_template(tiny) -> None:
    from tokenizers import models

    with pytest.raises(CanvasError, match="no tokenizer") as error:
        Tokenizer.load(tiny.model.bundle)
    assert "--prompt-ids" in error.value.hint
    with pytest.raises(CanvasError, match="no chat template"):
        Tokenizer(Core(models.BPE()), None).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["demo", "diffusion_gemma", "gemma4", "gemma3", "gemma"])
def test_rendering_is_transformers_own(reference, name: str) -> None:
    """Some of these templates compare control tokens with parts of messages."""
    folder = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations)))
    file = folder / "chat_templates" / f"{name}.jinja"
    source = file.read_text("utf-8") if file.exists() else reference.chat_template
    core = Core.from_file(str(DEMO_FOLDER / "checkpoint" / "tokenizer.json"))
    core.add_special_tokens(["<|channel>", "<channel|>", "<|tool_call>", "<start_of_turn>"])
    ours = Tokenizer(core, source, {"bos_token": "<bos>"})
    chat = [
        {"role": "user", "content": " > a <\n"},
        {"role": "assistant", "content": "<|channel>thought\nx<channel|> |turn>46 <"},
        {"role": "user", "content": "<|turn>12+34=<turn|"},
    ]
    text = reference.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ours.render_chat(chat) == text
    plain = [*chat[:1], {"role": "assistant", "content": "|turn>46 <"}, *chat[:1]]
    text = ours.render_chat(plain)
    assert ours.encode_chat(plain) == ours.encode(text, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("chat_template.jinja", "{% if")],
)
def test_a_damaged_file_is_named(name: str, text: str, tmp_path: Path) -> None:
    """`build` reads the tokenizer first, so it reports a damaged file before it calibrates."""
    whole = demo_checkpoint()
    files = {each: whole / each for each in ("tokenizer.json", "tokenizer_config.json")}
    (tmp_path / name).write_text(text)
    with pytest.raises(CanvasError, match=f"cannot use .*{name}"):
        Tokenizer.read(files | {name: tmp_path / name})
