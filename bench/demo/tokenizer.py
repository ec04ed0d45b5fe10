"""The demo's tokenizer: one token per printable ASCII character, and Gemma's special tokens."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNK, TURN_START_ID, TURN_END_ID, NEWLINE, IMAGE_START, IMAGE_END, IMAGE_ID = range(
    10
)
SPECIAL = {
    "<pad>": PAD,
    "<eos>": EOS,
    "<bos>": BOS,
    "<unk>": UNK,
    "<|turn>": TURN_START_ID,
    "<turn|>": TURN_END_ID,
    "<|image>": IMAGE_START,
    "<image|>": IMAGE_END,
    "<|image|>": IMAGE_ID,
}
PRINTABLE = [" ", *string.punctuation, *string.digits, *string.ascii_letters]
# Their ids follow the characters'. The demo was not trained on these tokens: only a grammar makes it call a tool.
CALLS = ("<|tool_call>", "<tool_call|>")
# A multiple of 8, so that kernels and the two-level sum over the vocabulary need no padding.
VOCAB_SIZE = 112

CHAT_TEMPLATE = """\
{#- Calls, their results and the declared tools are left out, since the demo was not trained on them. -#}
{{- bos_token -}}
{%- for message in messages if message['role'] != 'tool' and not message['tool_calls'] -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|turn>' + role + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'text' -%}
{{- item['text'] | trim -}}
{%- elif item['type'] == 'image' -%}
{{- '<|image|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def build_tokenizer(calls: Sequence[str] = CALLS) -> PreTrainedTokenizerFast:
    """Return a tokenizer that renders a chat with the template and encodes the text character by character."""
    vocab = dict(SPECIAL) | {"\n": NEWLINE}
    for token in (*PRINTABLE, *calls):
        vocab[token] = len(vocab)
    while len(vocab) < VOCAB_SIZE:
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    # BPE without merges splits a text into characters.
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *calls)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def chat_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Return the token ids of a chat with one user message."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
