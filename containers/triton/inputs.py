"""Decodes request tensors. Invalid shapes are refused before memory is allocated for them."""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canvasrt.containers.names import CALLER_SECRET_VARIABLE
from canvasrt.containers.tensors import (
    ANSWERS,
    ANY,
    ARRIVED,
    ERRORS,
    INPUTS,
    MAX_BIASED,
    MAX_IMAGES,
    MAX_LISTED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ONE,
    OWNER,
    PROMPTS,
    Tensor,
    inputs_of,
)
from canvasrt.containers.untrusted import load_json
from canvasrt.errors import CanvasError

# Prefixes of the parameters that Triton's own front ends add; all other parameters come from the caller.
_TRITON_PARAMETERS = (
    "binary_data_output",
    "headers",
    "priority",
    "sequence_",
    "timeout",
    "triton_",
)


def check_parameters(parameters: Mapping[str, Any], model: str) -> None:
    """Raise CanvasError for an unknown parameter, and for a number from the front end that is not an integer.

    The `generate` endpoints convert unknown JSON fields to parameters. Without this check, a misspelled option would be
    ignored silently.
    """
    for name in (ANSWERS, ARRIVED):
        if not isinstance(value := parameters.get(name, 0), int):
            raise CanvasError(f"{name} is {value!r}", "give a whole number")
    for name in parameters:
        if name not in (ERRORS, OWNER, ANSWERS, ARRIVED) and not name.startswith(
            _TRITON_PARAMETERS
        ):
            known = ", ".join(tensor.name for tensor in inputs_of(model))
            raise CanvasError(f"unknown input {name!r}", f"give one of {known}")


def caller_of(parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a request's caller, and the id by which the front end can cancel the request; empty strings
    for a request that bypassed the front end. Raises CanvasError for a name without the front end's secret."""
    given, secret = str(parameters.get(OWNER, "")), os.environ.get(CALLER_SECRET_VARIABLE, "")
    if not given:
        return "", ""
    if not secret or not hmac.compare_digest(given[: len(secret)].encode(), secret.encode()):
        raise CanvasError(f"only the front end may set {OWNER}", f"leave out {OWNER}")
    owner, _, call = given[len(secret) :].partition("/")
    return owner, call


def check_shapes(shapes: Mapping[str, Sequence[int]], max_context: int, canvas: int) -> None:
    """Raise CanvasError if a tensor has a wrong shape or too many elements. Checks this before tensors are decoded."""
    sizes: dict[str, int] = {}
    for name, tensor in INPUTS.items():
        if name in shapes:
            shape = [int(size) for size in shapes[name]]
            _check_shape(tensor, shape)
            sizes[name] = shape[0]
    if (count := sizes.get("prompt_ids", 0)) > max_context:
        raise CanvasError(
            f"the prompt ({count} tokens) plus the new tokens exceed the context of {max_context}",
            f"shorten the prompt to {max_context - canvas} tokens, to leave room for {canvas} new tokens",
        )
    _check_stop_count(sizes.get("stop", 0))
    most = {
        "images": MAX_IMAGES,
        "image_tokens": MAX_IMAGES,
        "stop_token_ids": MAX_STOPS,
        "logprob_token_ids": MAX_LISTED,
    }
    for name, limit in most.items():
        if (count := sizes.get(name, 0)) > limit:
            raise CanvasError(f"{name} has {count} elements", f"send at most {limit}")


def _check_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    if tensor.shape == ANY and len(shape) != 1:
        raise CanvasError(
            f"{tensor.name} has the shape {list(shape)}", f"send {tensor.name} as one list"
        )
    if tensor.shape == ONE and list(shape) != [1]:
        raise CanvasError(
            f"{tensor.name} has the shape {list(shape)}, not [1]",
            f"send one value of {tensor.name} per request",
        )


def read_inputs(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return tensors as Python values: text as str, image files as bytes, tensors of variable length as lists or
    arrays, and other tensors as numbers.

    Raises CanvasError, which names the tensor, for a wrong shape or text that is not UTF-8.
    """
    values: dict[str, Any] = {}
    for name, tensor in INPUTS.items():
        if (array := arrays.get(name)) is None:
            continue
        _check_shape(tensor, array.shape)
        if name == "images":
            values[name] = [_file(item) for item in array]
        elif tensor.datatype == "INT32" and tensor.shape == ANY:
            # A copy, because Triton frees the tensor's memory with the request.
            values[name] = np.array(array)
        else:
            values[name] = tensor.decode(array)
    return values


def _file(item: Any) -> bytes:
    """Return an image file that was sent as raw bytes, a data URL or base64. A request in JSON cannot send raw
    bytes."""
    data = item.encode() if isinstance(item, str) else bytes(item)
    if not data.startswith(b"data:"):
        return _decoded(data) or data
    found = _decoded(data.partition(b",")[2])
    if found is None:
        raise CanvasError(
            "images has a data URL that is not base64", "send data:image/png;base64,…"
        )
    return found


def _decoded(data: bytes) -> bytes | None:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        return None


def chosen_prompt(values: Mapping[str, Any]) -> str:
    """Return which of prompt, messages and prompt_ids a request has. Raises CanvasError unless it has exactly one."""
    given = [tensor.name for tensor in PROMPTS if tensor.name in values]
    names = ", ".join(tensor.name for tensor in PROMPTS)
    if not given:
        raise CanvasError("the request has no prompt", f"send one of {names}")
    if len(given) > 1:
        raise CanvasError(
            f"the request has more than one prompt: {' and '.join(given)}",
            f"send only one of {names}",
        )
    return given[0]


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the strings of a `stop` tensor. Raises CanvasError if a string is empty or too long, or if there are too
    many strings."""
    if "" in stops:
        raise CanvasError("stop contains an empty string", "leave it out")
    _check_stop_count(len(stops))
    longest = max((len(stop) for stop in stops), default=0)
    if longest > MAX_STOP_LENGTH:
        raise CanvasError(
            f"stop contains a string of {longest} characters", f"send at most {MAX_STOP_LENGTH}"
        )
    return tuple(stops)


def _check_stop_count(count: int) -> None:
    if count > MAX_STOPS:
        raise CanvasError(f"stop contains {count} strings", f"send at most {MAX_STOPS}")


def read_json(name: str, text: str, hint: str) -> Any:
    """Parse the JSON value in a tensor. Raises CanvasError with `hint` if the text is not JSON."""
    try:
        return load_json(text)
    except ValueError as error:
        raise CanvasError(f"{name} is not JSON: {error}", hint) from None


def read_object(name: str, text: str, hint: str) -> dict[str, Any]:
    """Parse the JSON object in a tensor. Raises CanvasError with `hint` if the text is not a JSON object."""
    found = read_json(name, text, hint)
    if not isinstance(found, dict):
        raise CanvasError(f"{name} is not a JSON object", hint)
    return found


def read_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Parse a `logit_bias` tensor into pairs of a token and its bias. Raises CanvasError if the text is invalid."""
    example = 'send numbers by token id, such as {"17": -100}'
    found = read_object("logit_bias", text, example)
    if len(found) > MAX_BIASED:
        raise CanvasError(f"logit_bias has {len(found)} tokens", f"send at most {MAX_BIASED}")
    for token, value in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise CanvasError(f"logit_bias names {token!r}, which is not a token id", example)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CanvasError(f"logit_bias of token {token} is {value!r}", example)
    # Converted through text, so that an integer that is too large for a float becomes infinity.
    return tuple((int(token), float(str(value))) for token, value in found.items())


def read_messages(text: str) -> list[dict[str, Any]]:
    """Parse the chat in a `messages` tensor. If a message is wrong, raises CanvasError, which names its number."""
    example = '[{"role": "user", "content": "Hello"}]'
    messages = read_json("messages", text, f"send {example}")
    if not isinstance(messages, list) or not messages:
        raise CanvasError("messages is not a list of messages", f"send {example}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CanvasError(f"message {index} has no role", f"send {example}")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not calls and not isinstance(message.get("content"), (str, list)):
            raise CanvasError(f"message {index} has no content", f"send {example}")
    return messages


def read_template(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's variables for the chat template. Raises CanvasError if they are not a JSON object."""
    return read_object("template", values.get("template", "{}"), 'send {"enable_thinking": true}')
