"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from canvasrt.containers.openai.aside import Aside
from canvasrt.containers.openai.disconnect import unless_disconnected
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.functions import Tools
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.middleware import parameters_of
from canvasrt.containers.openai.part_limits import Messages
from canvasrt.containers.openai.schema import ChatRequest, Strict, only
from canvasrt.containers.openai.tools import template_inputs
from canvasrt.containers.openai.upstream import Upstream
from canvasrt.runtime.sampling_params import MAX_INT32


class TokenizeRequest(Strict):
    """The body of `POST /tokenize`: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    continue_final_message: only(False) = None  # type: ignore[valid-type]
    chat_template: only() = None  # type: ignore[valid-type]

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the served model. ApiError names what is wrong."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Send either prompt or messages.", "prompt", "invalid_value")
        options = {
            "spell": self.return_token_strs,
            "add_generation_prompt": self.add_generation_prompt,
        }
        if self.prompt is not None:
            special = self.add_special_tokens is not False
            options["add_special_tokens"] = special
            return {"prompt": self.prompt, "raw": True, "tokenize": json.dumps(options)}
        if self.add_special_tokens:
            raise bad_request(
                "add_special_tokens is not supported with messages: the chat template writes them.",
                "add_special_tokens",
                "unsupported_parameter",
            )
        chat = read_messages(self.messages or [])
        if chat.images:
            raise bad_request(
                "messages have images, whose tokens depend on their sizes; send text.",
                "messages",
                "unsupported_parameter",
            )
        request = ChatRequest(
            model="",
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        template = {k: v for k, v in template_inputs(request).items() if k == "template"}
        return {
            "messages": json.dumps(chat.messages),
            "tokenize": json.dumps(options),
            **template,
        }


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(fail_fast=True)]


class Tokens:
    """Answers requests through one upstream. `max_context` is in tokens."""

    def __init__(self, upstream: Upstream, aside: Aside, max_context: int | None) -> None:
        self._upstream = upstream
        self._aside = aside
        self._max_context = max_context

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Return a prompt's tokens."""
        inputs = await self._aside.run(len(await request.body()), body.inputs)
        ids, found = await self._ask(request, inputs)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._max_context,
                "tokens": ids,
                "token_strs": found.get("tokens"),
            }
        )

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """Return the text of tokens."""
        if not body.tokens:
            return JSONResponse({"prompt": ""})
        if self._max_context is not None and len(body.tokens) > self._max_context:
            raise bad_request(
                f"tokens has {len(body.tokens)} tokens; at most {self._max_context} are allowed.",
                "tokens",
                "invalid_value",
            )
        inputs = {"prompt_ids": body.tokens, "tokenize": "{}"}
        try:
            _, found = await self._ask(request, inputs)
        except ApiError as error:
            error.param = "tokens" if error.status == 400 else error.param
            raise
        return JSONResponse({"prompt": found["text"]})

    async def _ask(
        self, request: Request, inputs: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        final = await unless_disconnected(
            request.receive, self._final(inputs, parameters_of(request))
        )
        return list(final.prompt_token_ids), json.loads(final.text)

    async def _final(self, inputs: dict[str, Any], parameters: Mapping[str, int | str]) -> Any:
        (final,) = [event async for event in self._upstream.stream(inputs, parameters)]
        return final
