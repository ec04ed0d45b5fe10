"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from canvasrt.containers.openai import fields
from canvasrt.containers.openai.body import Body, Messages
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.generation import Answer, Generation, Reply, Served
from canvasrt.containers.openai.messages import has_images
from canvasrt.containers.openai.tools import ChatRequest, Tools, template_inputs, template_names
from canvasrt.runtime.sampling_params import MAX_INT32
from canvasrt.types import Json


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a prompt, or messages for the chat template."""

    table: ClassVar[fields.Table] = fields.TOKENIZE

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(fail_fast=True)]


class Tokenized(TypedDict):
    """The reply: token ids, and their number."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The reply: the tokens' text."""

    prompt: str


def tokenize(body: TokenizeRequest) -> Generation:
    """Return the generation that only encodes a prompt or a chat. If a field is wrong, raises an ApiError that names
    that field."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt", "invalid_value")
    options = {
        "spell": body.return_token_strs,
        "add_generation_prompt": body.add_generation_prompt,
    }
    if body.prompt is not None:
        options["add_special_tokens"] = body.add_special_tokens is not False
        prompt = {"prompt": body.prompt, "raw": True}
        return _encoding(options, prompts=[prompt])
    if body.add_special_tokens:
        raise bad_request(
            "add_special_tokens is not supported with messages: the chat template writes them.",
            "add_special_tokens",
            "unsupported_parameter",
        )
    messages = body.messages or []
    if has_images(messages):
        raise bad_request(
            "messages have images, whose number of tokens depends on their size; send only text.",
            "messages",
            "unsupported_parameter",
        )
    request = ChatRequest(
        model="",
        messages=messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    asked = _encoding(options, messages=messages, ignored=body.ignored)
    asked.names = template_names(request)
    asked.options |= {k: v for k, v in template_inputs(request).items() if k == "template"}
    return asked


def detokenize(body: DetokenizeRequest) -> Generation:
    """Return the generation that only decodes tokens."""
    return _encoding({}, prompts=[{"prompt_ids": body.tokens}] if body.tokens else [])


def _encoding(options: Json, **more: Any) -> Generation:
    tokenize = {"tokenize": json.dumps(options)}
    return Generation(tokenize, **more, seed=0, plain=True)


class TokenizeReply(Reply):
    """Renders the tokens of a prompt."""

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        super().__init__(body, asked, seed, served)
        self.text_field = "prompt" if body.messages is None else "messages"

    def whole(self, answers: Sequence[Answer]) -> Json:
        final = answers[0].final
        return {
            "count": len(final.prompt_token_ids),
            "max_model_len": self.served.max_context,
            "tokens": list(final.prompt_token_ids),
            "token_strs": json.loads(final.text).get("tokens"),
        }


class DetokenizeReply(Reply):
    """Renders the text of tokens."""

    text_field = "tokens"

    def whole(self, answers: Sequence[Answer]) -> Json:
        return {"prompt": json.loads(answers[0].final.text)["text"] if answers else ""}


TOKENIZE = Endpoint(
    "/tokenize",
    "Return the tokens of a prompt or a chat.",
    TokenizeRequest,
    tokenize,
    TokenizeReply,
    Tokenized,
)
DETOKENIZE = Endpoint(
    "/detokenize",
    "Return the text of tokens.",
    DetokenizeRequest,
    detokenize,
    DetokenizeReply,
    Detokenized,
)
