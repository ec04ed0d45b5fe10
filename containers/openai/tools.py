"""A chat's tools and thinking, as callers give them and as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from canvasrt.chat_tokens import CALL
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.functions import Function, NamedTool, Tool, ToolChoice
from canvasrt.containers.openai.messages import has_images
from canvasrt.containers.openai.parse_answer import AnswerReader
from canvasrt.containers.openai.schema import ChatRequest


def schemas(request: ChatRequest) -> dict[str, Mapping[str, Any]] | None:
    """Return the schemas of the parameters of the tools that the model may call, by name; None if
    it may call none."""
    if not request.tools or request.tool_choice == "none":
        return None
    return {each.function.name: each.function.parameters or {} for each in request.tools}


def check(request: ChatRequest) -> None:
    """Raise ApiError for tools that do not fit together."""
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


def template_inputs(request: ChatRequest) -> dict[str, Any]:
    """Return the inputs of the model that make it think and call tools as the caller wants.

    A call that must come is begun in the prompt, so no thought precedes it.
    """
    check(request)
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    thinking = request.enable_thinking
    if thinking is None and request.reasoning_effort is not None:
        thinking = request.reasoning_effort != "none"
    if thinking is not None:
        variables["enable_thinking"] = thinking
    if schemas(request) is not None:
        variables["tools"] = [_plain(each) for each in request.tools or ()]
    inputs: dict[str, Any] = {"control": True}
    if variables:
        inputs["template"] = json.dumps(variables)
    grammar = tools_grammar(request)
    if isinstance(request.tool_choice, NamedTool):
        # Behind a name, only the grammar can tell where the arguments begin.
        brace = "" if grammar else "{"
        inputs["prefix"] = f"{CALL}call:{request.tool_choice.function.name}{brace}"
    elif request.tool_choice == "required":
        inputs["prefix"] = f"{CALL}call:"
    if grammar:
        inputs["grammar"] = json.dumps(grammar)
    return inputs


def tools_grammar(request: ChatRequest) -> dict[str, Any] | None:
    """Return the grammar that makes calls follow the tools' schemas, or None if none is wanted.

    A call that must come follows its schema unless `strict` is false; one that may come, only if it
    is true. What grammars do not support goes before them, except under `strict`.
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
    if begun == "nothing" and (not strict or request.response_format is not None):
        return None
    others = has_images(request.messages) or any(
        getattr(request, name)
        for name in ("logprobs", "settle_steps", "score_blocks", "redo_below")
    )
    if not strict and (others or all(each.strict is False for each in functions)):
        return None
    return {
        "type": "tool_calls",
        "tools": {each.name: _enforced(each, begun) for each in functions},
        "begun": begun,
        "parallel": request.parallel_tool_calls is not False,
        "strict": strict,
    }


def _enforced(function: Function, begun: str) -> dict[str, Any]:
    if function.strict is False or (begun == "nothing" and not function.strict):
        return {}
    return function.parameters or {}


def reader_of(request: ChatRequest) -> Callable[[], AnswerReader]:
    """Return what makes the readers of the request's answers."""
    tools, parallel = schemas(request), request.parallel_tool_calls is not False
    return lambda: AnswerReader(tools, parallel)


def _plain(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    # Templates write the description without asking whether there is one.
    return {"type": "function", "function": {"description": "", **function}}


def _shown(choice: ToolChoice | None) -> str:
    return repr(choice.function.name if isinstance(choice, NamedTool) else choice)
