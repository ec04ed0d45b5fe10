"""The body of chats. Converts its fields about tools and thinking to inputs of the chat template and to grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from canvasrt.chat_tokens import CALL
from canvasrt.containers.openai.body import Budget, ImageTokens, Messages, Sampling, Strict, about
from canvasrt.containers.openai.errors import bad_request, leading
from canvasrt.containers.openai.fields import CHAT, Table
from canvasrt.containers.openai.response_formats import Format

MAX_TOOLS = 128  # as in OpenAI's API
# OpenAI's chats allow names of 64 characters, its responses and Anthropic's messages 128.
Name = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class _Named(Strict):
    name: Name


class NamedTool(Strict):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class AllowedTools(Strict):
    """A `tool_choice` that names the functions that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ChatRequest(Sampling):
    """The body of a chat completion."""

    table: ClassVar[Table] = CHAT

    messages: Messages
    tools: Annotated[Tools | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None, about("Whether the model may or must call a tool, or which one.")
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: Annotated[
        bool | None, about("Whether the model thinks before it answers.")
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Budget = None
    image_tokens: ImageTokens = None

    def check(self, size: int) -> None:
        super().check(size)
        if self.max_completion_tokens is not None and self.max_tokens not in (
            None,
            self.max_completion_tokens,
        ):
            raise bad_request(
                "max_tokens and max_completion_tokens disagree; send one of them.",
                "max_tokens",
                "invalid_value",
            )

    @property
    def token_budget(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @model_validator(mode="after")
    def _allow(self) -> ChatRequest:
        """Drop the tools that `tool_choice` does not allow."""
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = {each.function.name for each in allowed.tools}
            if foreign := names - {each.function.name for each in self.tools or ()}:
                raise bad_request(
                    f"tool_choice names {min(foreign)!r}, which is not one of tools.",
                    "tool_choice",
                    "invalid_value",
                )
            self.tools = [each for each in self.tools or () if each.function.name in names]
            self.tool_choice = allowed.mode
        return self


def schemas(request: ChatRequest) -> dict[str, Mapping[str, Any]] | None:
    """Return a map from each tool's name to the schema of its parameters; None if the request allows no tool calls."""
    if not request.tools or request.tool_choice == "none":
        return None
    return {each.function.name: each.function.parameters or {} for each in request.tools}


def _check(request: ChatRequest) -> None:
    """Raise ApiError if `tools` has a name twice or does not fit `tool_choice`."""
    names = [each.function.name for each in request.tools or ()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise bad_request(f"tools has two functions named {twice!r}.", "tools", "invalid_value")
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise bad_request(
            f"tool_choice {_shown(choice)} needs tools.", "tool_choice", "invalid_value"
        )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice names {choice.function.name!r}, which is not one of tools.",
            "tool_choice",
            "invalid_value",
        )


def template_inputs(request: ChatRequest, wanted: Format | None = None) -> dict[str, Any]:
    """Return the model's inputs for thinking and tools. `wanted` is the format of an answer without calls.

    If a call is required, the prompt contains the beginning of the call, so no thought precedes the call.
    """
    _check(request)
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    thinking = _thinking(request)
    if thinking is not None:
        variables["enable_thinking"] = thinking
    if schemas(request) is not None:
        variables["tools"] = [_plain(each) for each in request.tools or ()]
    inputs: dict[str, Any] = {"control": True}
    if variables:
        inputs["template"] = json.dumps(variables)
    grammar = tools_grammar(request, wanted)
    if isinstance(request.tool_choice, NamedTool):
        inputs["prefix"] = f"{CALL}call:{request.tool_choice.function.name}"
    elif request.tool_choice == "required":
        inputs["prefix"] = f"{CALL}call:"
    if grammar:
        inputs["grammar"] = json.dumps(grammar)
    return inputs


def _thinking(request: ChatRequest) -> bool | None:
    """Return whether the model is to think; None if the request does not specify that. Some clients send
    `reasoning_effort` to every model, so a model that cannot think ignores that field."""
    if request.enable_thinking is not None or request.reasoning_effort is None:
        return request.enable_thinking
    if request.reasoning_effort == "none":
        return False
    if request.ignored is not None and not request.ignored.thinks:
        request.ignored.note("reasoning_effort has no effect: this model cannot think.")
        return None
    return True


def template_names(request: ChatRequest) -> dict[str, str]:
    """Return a map from patterns of the template's variables to the request's fields that set them."""
    given = request.chat_template_kwargs or {}
    names = {leading(name): f"chat_template_kwargs.{name}" for name in given}
    if request.enable_thinking is not None:
        names[leading("enable_thinking")] = "enable_thinking"
    elif request.reasoning_effort is not None:
        names[leading("enable_thinking")] = "reasoning_effort"
    return names


def tools_grammar(request: ChatRequest, wanted: Format | None = None) -> dict[str, Any] | None:
    """Return the grammar that enforces the tools' schemas in calls, or None if no schema is enforced.

    A required call follows its tool's schema. An optional call follows the schema only if its tool is `strict`. An
    answer without calls follows the format `wanted`. Raises ApiError if `wanted` is not JSON.
    """
    found = schemas(request)
    if found is None:
        return None
    functions = [each.function for each in request.tools or ()]
    choice, begun = request.tool_choice, "nothing"
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
        begun = "name"
    elif choice == "required":
        begun = "call"
    strict = any(each.strict for each in functions)
    answer = None
    if begun == "nothing" and wanted is not None:
        if wanted.grammar["type"] not in ("json_schema", "json_object"):
            raise bad_request(
                f"{wanted.path} is not supported with tools that may be called: leave out the tools or the format.",
                wanted.path,
                "unsupported_parameter",
            )
        answer = wanted.grammar.get("schema", {"type": "object"})
        if answer is None:
            return None  # the model refuses a format without a schema
    elif begun == "nothing" and not strict:
        return None
    return {
        "type": "tool_calls",
        "tools": {
            each.name: each.parameters or {} if begun != "nothing" or each.strict else {}
            for each in functions
        },
        "begun": begun,
        "answer": answer,
        "parallel": request.parallel_tool_calls is not False,
        "strict": strict,
    }


def _plain(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    # Templates expect that every tool has a description.
    return {"type": "function", "function": {"description": "", **function}}


def _shown(choice: ToolChoice | None) -> str:
    return repr(choice.function.name if isinstance(choice, NamedTool) else choice)
