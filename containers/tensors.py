"""The tensors of the served models: one table for Triton's configuration and for the checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError

ANSWER_MODEL = "canvasrt"
STREAM_MODEL = "canvasrt_stream"
MAX_STOPS = 16
# A parameter of a request to the stream model: its error comes as an event of this name, with the code
# and the message as JSON. Streams of Triton's have no codes, and its option that gives them one
# (triton_grpc_error) has crashed it.
ERRORS, ERROR_EVENT = "canvasrt_errors", "error"
HINT = ". Hint: "  # between what was wrong and the way out, in an error reply


@dataclass(frozen=True)
class Tensor:
    """One input or output. `shape` holds -1 where any length is allowed."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    about: str

    @property
    def config_type(self) -> str:
        """The name of the type in a model configuration, which differs for text alone."""
        return "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"


PROMPTS = (
    Tensor("prompt", "BYTES", (1,), "one user message; the chat template is put around it"),
    Tensor("messages", "BYTES", (1,), "a chat: a JSON list of `{role, content}`, as one string"),
    Tensor("prompt_ids", "INT32", (-1,), "token ids, taken as they are, without a template"),
)
OPTIONS = (
    Tensor("max_new_tokens", "INT32", (1,), "most tokens to generate"),
    Tensor("seed", "UINT64", (1,), "what the noise is made from; 0 when absent"),
    Tensor("max_denoising_steps", "INT32", (1,), "most denoising steps a block"),
    Tensor("entropy_bound", "FP32", (1,), "entropy accepted a step, in nats"),
    Tensor("t_min", "FP32", (1,), "temperature of the last step"),
    Tensor("t_max", "FP32", (1,), "temperature of the first step"),
    Tensor("stability_threshold", "INT32", (1,), "steps a canvas must stay the same to stop early"),
    Tensor(
        "confidence_threshold", "FP32", (1,), "mean entropy below which a canvas may stop early"
    ),
)
EARLY_STOP = Tensor(
    "early_stop", "BOOL", (1,), "false takes every denoising step; true when absent"
)
STOP = Tensor("stop", "BYTES", (-1,), "strings that end the answer, which is cut before them")
RAW = Tensor("raw", "BOOL", (1,), "take `prompt` as it is, without the chat template")
DRAFTS = Tensor("drafts", "BOOL", (1,), "also send the canvas after every denoising step")

RESULT = (
    Tensor("text", "BYTES", (1,), "the answer; in a `draft` or `block`, that canvas or block"),
    Tensor("token_ids", "INT32", (-1,), "its tokens, with the one that ends the sequence"),
    Tensor("prompt_token_ids", "INT32", (-1,), "the prompt's tokens; empty before `final`"),
    Tensor("finish_reason", "BYTES", (1,), "`stop` or `length`; empty before `final`"),
    Tensor("steps", "INT32", (-1,), "denoising steps of every finished block"),
    Tensor("seed", "UINT64", (1,), "the seed that was used"),
)
PROGRESS = (
    Tensor("event", "BYTES", (1,), "`draft`, `block` or `final`"),
    Tensor("block", "INT32", (1,), "the block that the event is about, from 0"),
    Tensor("step", "INT32", (1,), "denoising steps done in that block"),
)


def inputs_of(model: str) -> tuple[Tensor, ...]:
    """Every input of the answer model or the stream model; all of them are optional to Triton."""
    drafts = (DRAFTS,) if model == STREAM_MODEL else ()
    return (*PROMPTS, RAW, *OPTIONS, EARLY_STOP, STOP, *drafts)


def outputs_of(model: str) -> tuple[Tensor, ...]:
    """Every output of the answer model or the stream model."""
    return (*PROGRESS, *RESULT) if model == STREAM_MODEL else RESULT


# What Triton's own front ends put among a request's parameters; everything else is a caller's.
_TRITON_PARAMETERS = (
    "binary_data_output",
    "headers",
    "priority",
    "sequence_",
    "timeout",
    "triton_",
)


def check_parameters(parameters: Mapping[str, Any], model: str) -> None:
    """Refuses parameters that nothing reads.

    The `generate` endpoints turn a JSON field that is not an input into a parameter, so that a
    misspelled option would be ignored without a word.
    """
    for name in parameters:
        if name != ERRORS and not name.startswith(_TRITON_PARAMETERS):
            known = ", ".join(tensor.name for tensor in inputs_of(model))
            raise CanvasError(f"unknown input {name!r}", f"the inputs are {known}")


def read_inputs(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Tensors as Python values: str for text, a list of int for `prompt_ids`, else a number.

    `arrays` holds only the tensors of a request. CanvasError names the tensor that has the wrong
    shape or is not UTF-8.
    """
    values: dict[str, Any] = {}
    for tensor in inputs_of(STREAM_MODEL):
        array = arrays.get(tensor.name)
        if array is None:
            continue
        if tensor.shape == (-1,):
            values[tensor.name] = _list(tensor, array)
        else:
            values[tensor.name] = _scalar(tensor, array)
    return values


def _list(tensor: Tensor, array: np.ndarray) -> list[Any]:
    if array.ndim != 1:
        raise CanvasError(
            f"{tensor.name} has the shape {list(array.shape)}", f"send {tensor.name} as one list"
        )
    if tensor.datatype == "BYTES":
        return [_text(tensor.name, item) for item in array]
    return [int(item) for item in array]


def _scalar(tensor: Tensor, array: np.ndarray) -> Any:
    if array.shape != (1,):
        raise CanvasError(
            f"{tensor.name} has the shape {list(array.shape)}, not [1]",
            f"send one value; several {tensor.name} values take a request each",
        )
    item = array[0]
    if tensor.datatype == "BYTES":
        return _text(tensor.name, item)
    if tensor.datatype == "FP32":
        return float(str(item))  # the decimal that the caller wrote: 0.1, not 0.10000000149
    return bool(item) if tensor.datatype == "BOOL" else int(item)


def _text(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CanvasError(
            f"{name} is not UTF-8: {error.reason} at byte {error.start}",
            f"encode {name} as UTF-8",
        ) from None


def chosen_prompt(values: Mapping[str, Any]) -> str:
    """Which of prompt, messages and prompt_ids a request gives; CanvasError unless exactly one."""
    given = [tensor.name for tensor in PROMPTS if tensor.name in values]
    names = ", ".join(tensor.name for tensor in PROMPTS)
    if not given:
        raise CanvasError("the request has no prompt", f"send one of {names}")
    if len(given) > 1:
        raise CanvasError(f"the request has {' and '.join(given)}", f"send only one of {names}")
    return given[0]


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The strings of a `stop` tensor; CanvasError for an empty one, or too many."""
    if "" in stops:
        raise CanvasError("stop holds an empty string", "leave it out")
    if len(stops) > MAX_STOPS:
        raise CanvasError(f"stop holds {len(stops)} strings", f"send at most {MAX_STOPS}")
    return tuple(stops)


def read_messages(text: str) -> list[dict[str, Any]]:
    """The chat in a `messages` tensor; CanvasError says which message is wrong."""
    example = '[{"role": "user", "content": "Hello"}]'
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise CanvasError(
            f"messages is not JSON: {error.msg} at character {error.pos}", f"send {example}"
        ) from None
    if not isinstance(messages, list) or not messages:
        raise CanvasError("messages is not a list of messages", f"send {example}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CanvasError(f"message {index} has no role", f"send {example}")
        if not isinstance(message.get("content"), (str, list)):
            raise CanvasError(f"message {index} has no content", f"send {example}")
    return messages
