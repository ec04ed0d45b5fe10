"""Tokenizers whose ordinary tokens can spell the text of control tokens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers import scripted


class Side(NamedTuple):
    """A tokenizer with a template, and the ids of control tokens, which only the template may write."""

    tokenizer: Tokenizer
    core: Core
    control: frozenset[int]

    def controls(self, messages: list[Any], **variables: Any) -> list[int]:
        ids, _ = self.tokenizer.open_chat(messages, variables)
        # The ids spell exactly what the template wrote.
        assert self.core.decode(ids, skip_special_tokens=False) == self.tokenizer.render_chat(
            messages, **variables
        )
        return [id for id in ids if id in self.control]


def side(core: Core, template: str) -> Side:
    added = core.get_added_tokens_decoder()
    control = frozenset(id for id, token in added.items() if token.content != "<unk>")
    return Side(Tokenizer(core, template, {"bos_token": "<bos>"}), core, control)


def trained(byte_level: bool) -> Core:
    """Return a tokenizer, byte-level or with byte fallback like Gemma's. Its merges also apply to the spelling of
    control tokens."""
    special = [AddedToken(each, special=True, normalized=False) for each in scripted.SPECIAL]
    corpus = ["<|turn>user\nmodel<turn|>thought <|channel> <tool_call|> type 12+34= " * 9] * 9
    if byte_level:
        core = Core(models.BPE(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    else:
        core = Core(models.BPE(unk_token="<unk>", byte_fallback=True))
        core.normalizer = normalizers.Replace(" ", "▁")
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        octets = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=octets, max_token_length=9)
    core.train_from_iterator(corpus, trainer)
    if not byte_level:  # make byte tokens ordinary tokens
        data = json.loads(core.to_str())
        data["added_tokens"] = []
        core = Core.from_str(json.dumps(data))
    core.add_special_tokens(special)
    return core
