"""The tensors of the served models: one table for Triton's configuration and for checking
requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canvasrt.containers.untrusted import load_json
from canvasrt.errors import CanvasError
from canvasrt.runtime.sampling_params import PARAMETERS

ANSWER_MODEL = "canvasrt"
STREAM_MODEL = "canvasrt_stream"
MAX_IMAGES = 1024
MAX_CANVAS = 1 << 20  # characters of JSON
MAX_BIASED = 1024  # tokens
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000  # strings, and characters of one
# With this request parameter, the stream model reports an error as an event of that name, whose
# text is JSON with the code and the message. Triton's streams carry no codes, and its option to add
# them (triton_grpc_error) has crashed it.
ERRORS, ERROR_EVENT = "canvasrt_errors", "error"
# More request parameters of the front end: who asks, and for how many answers in all.
OWNER, ANSWERS = "canvasrt_owner", "canvasrt_answers"
# When the front end had the request, in microseconds of the monotonic clock, which all processes of a machine share.
ARRIVED = "canvasrt_arrived"
HINT = ". Hint: "  # in an error reply, between the message and the hint


@dataclass(frozen=True)
class Tensor:
    """One input or output. A dimension of -1 may have any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    about: str

    @property
    def config_type(self) -> str:
        """The type's name in a model configuration; only that of text differs."""
        return "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"


PROMPTS = (
    Tensor("prompt", "BYTES", (1,), "one user message, wrapped in the chat template"),
    Tensor("messages", "BYTES", (1,), "a chat: a JSON list of `{role, content}`, as one string"),
    Tensor("prompt_ids", "INT32", (-1,), "token ids, used as they are, without a template"),
)
OPTIONS = tuple(Tensor(each.name, each.datatype, (1,), each.about) for each in PARAMETERS)
LOGIT_BIAS = Tensor(
    "logit_bias", "BYTES", (1,), "what is added to the logits of tokens: JSON, numbers by token id"
)
CONDITIONS = Tensor(
    "canvas", "BYTES", (1,), "tokens that positions begin with, hold, or may have, as JSON"
)
STOP = Tensor("stop", "BYTES", (-1,), "strings that end the answer, which is cut before them")
TEMPLATE = Tensor(
    "template", "BYTES", (1,), "variables of the chat template, such as `tools`: a JSON object"
)
PREFIX = Tensor("prefix", "BYTES", (1,), "how the answer begins; the model continues it")
CONTROL = Tensor(
    "control", "BOOL", (1,), "keep the tokens around thoughts and tool calls in the text"
)
IMAGES = Tensor(
    "images", "BYTES", (-1,), "image files, or their data URLs, one for each image in the prompt"
)
IMAGE_TOKENS = Tensor(
    "image_tokens", "INT32", (-1,), "the most tokens of each image, or of all: 70, 140 or 280"
)
RAW = Tensor("raw", "BOOL", (1,), "use `prompt` as it is, without the chat template")
INFILL = Tensor(
    "infill", "BYTES", (1,), "a text with gaps such as `{4}`; `text` is then its filling as JSON"
)
GRAMMAR = Tensor(
    "grammar", "BYTES", (1,), "what the answer must follow, as JSON: a schema, a regex or a grammar"
)
QUESTIONS = Tensor(
    "questions", "BYTES", (1,), "closed questions as JSON; `text` is then their answers as JSON"
)
TOKENIZE = Tensor(
    "tokenize",
    "BYTES",
    (1,),
    "only encode or decode the prompt: options as JSON; `text` is then its text, as JSON",
)
DRAFTS = Tensor("drafts", "BOOL", (1,), "also send the canvas after every denoising step")

RESULT = (
    Tensor("text", "BYTES", (1,), "the answer; in other events, that canvas, or what they add"),
    Tensor("token_ids", "INT32", (-1,), "its tokens, including the one that ends the sequence"),
    Tensor("prompt_token_ids", "INT32", (-1,), "the prompt's tokens; empty before `final`"),
    Tensor("finish_reason", "BYTES", (1,), "`stop`, `length` or `grammar`; empty before `final`"),
    Tensor("steps", "INT32", (-1,), "denoising steps of each finished block"),
    Tensor("seed", "UINT64", (1,), "the seed that was used"),
    Tensor("cached_tokens", "INT32", (1,), "prompt tokens that came from the prefix cache"),
    Tensor(
        "logprobs", "BYTES", (1,), "the tokens' log-probabilities as JSON; empty if not asked for"
    ),
)
PROGRESS = (
    Tensor("event", "BYTES", (1,), "`draft`, `settled`, `block` or `final`"),
    Tensor("block", "INT32", (1,), "index of the event's block, from 0"),
    Tensor("step", "INT32", (1,), "denoising steps done in that block"),
)
CANVAS = Tensor("canvas", "BYTES", (1,), "the canvas of a `draft`, as JSON; no other event has it")
BLOCK_SCORES = Tensor(
    "block_scores",
    "BYTES",
    (1,),
    "each finished block's score, and how often it was redone, as JSON; only if asked for",
)


def inputs_of(model: str) -> tuple[Tensor, ...]:
    """Return the inputs of the answer model or the stream model; Triton treats all as optional."""
    drafts = (DRAFTS,) if model == STREAM_MODEL else ()
    return (
        *PROMPTS,
        RAW,
        TEMPLATE,
        PREFIX,
        IMAGES,
        IMAGE_TOKENS,
        *OPTIONS,
        LOGIT_BIAS,
        CONDITIONS,
        STOP,
        CONTROL,
        INFILL,
        GRAMMAR,
        QUESTIONS,
        TOKENIZE,
        *drafts,
    )


def outputs_of(model: str) -> tuple[Tensor, ...]:
    """Return the outputs of the answer model or the stream model."""
    result = (*RESULT, BLOCK_SCORES)
    return (*PROGRESS, *result, CANVAS) if model == STREAM_MODEL else result


# Triton's own front ends add these to a request's parameters; all others come from the caller.
_TRITON_PARAMETERS = (
    "binary_data_output",
    "headers",
    "priority",
    "sequence_",
    "timeout",
    "triton_",
)


def check_parameters(parameters: Mapping[str, Any], model: str) -> None:
    """Raise CanvasError for a parameter that nothing reads.

    The `generate` endpoints turn unknown JSON fields into parameters, so a misspelled option would
    be silently ignored.
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


def check_shapes(shapes: Mapping[str, Sequence[int]], max_context: int) -> None:
    """Raise CanvasError for a tensor with too many elements, before anything is made of them."""
    for tensor in inputs_of(STREAM_MODEL):
        shape = [int(size) for size in shapes.get(tensor.name, tensor.shape)]
        if len(shape) != 1 or (tensor.shape == (1,) and shape != [1]):
            raise _wrong_shape(tensor, shape)
    count = int(shapes.get("prompt_ids", (0,))[0])
    if count > max_context:
        raise CanvasError(
            f"the prompt ({count} tokens) plus the new tokens exceed the context of {max_context}",
            "shorten the prompt",
        )
    _check_stop_count(int(shapes.get("stop", (0,))[0]))
    for tensor in (IMAGES, IMAGE_TOKENS):
        if int(shapes.get(tensor.name, (0,))[0]) > MAX_IMAGES:
            raise CanvasError(
                f"{tensor.name} has {shapes[tensor.name][0]} elements", f"send at most {MAX_IMAGES}"
            )


def _wrong_shape(tensor: Tensor, shape: Sequence[int]) -> CanvasError:
    if tensor.shape == (-1,):
        return CanvasError(
            f"{tensor.name} has the shape {list(shape)}", f"send {tensor.name} as one list"
        )
    return CanvasError(
        f"{tensor.name} has the shape {list(shape)}, not [1]",
        f"send one value of {tensor.name} per request",
    )


def read_inputs(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return tensors as Python values: text as str, dimensions of -1 as lists or arrays, everything
    else as a number.

    CanvasError names a tensor with a wrong shape, or text that is not UTF-8.
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


def _list(tensor: Tensor, array: np.ndarray) -> Any:
    if array.ndim != 1:
        raise _wrong_shape(tensor, array.shape)
    if tensor is IMAGES:
        return [_file(item) for item in array]
    if tensor.datatype == "BYTES":
        return [_text(tensor.name, item) for item in array]
    return np.array(array)  # a copy: Triton's memory ends with the request


def _scalar(tensor: Tensor, array: np.ndarray) -> Any:
    if array.shape != (1,):
        raise _wrong_shape(tensor, array.shape)
    item = array[0]
    if tensor.datatype == "BYTES":
        return _text(tensor.name, item)
    if tensor.datatype == "FP32":
        return float(str(item))  # the decimal the caller wrote: 0.1, not 0.10000000149
    return bool(item) if tensor.datatype == "BOOL" else int(item)


def _file(item: Any) -> bytes:
    """Return a file that came as it is, as a data URL or in base64. JSON only carries the latter."""
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
    """Return which of prompt, messages and prompt_ids a request has. CanvasError unless it is
    exactly one."""
    given = [tensor.name for tensor in PROMPTS if tensor.name in values]
    names = ", ".join(tensor.name for tensor in PROMPTS)
    if not given:
        raise CanvasError("the request has no prompt", f"send one of {names}")
    if len(given) > 1:
        raise CanvasError(f"the request has {' and '.join(given)}", f"send only one of {names}")
    return given[0]


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the strings of a `stop` tensor. CanvasError for an empty string, or too many."""
    if "" in stops:
        raise CanvasError("stop contains an empty string", "leave it out")
    _check_stop_count(len(stops))
    longest = max((len(stop) for stop in stops), default=0)
    if longest > MAX_STOP_LENGTH:
        raise CanvasError(
            f"stop contains a string of {longest} characters", f"send at most {MAX_STOP_LENGTH}"
        )
    return tuple(stops)


def read_json(name: str, text: str, hint: str) -> Any:
    """Return the JSON value in a tensor. CanvasError, with that hint, if it holds none."""
    try:
        return load_json(text)
    except ValueError as error:
        raise CanvasError(f"{name} is not JSON: {error}", hint) from None


def read_object(name: str, text: str, hint: str) -> dict[str, Any]:
    """Return the JSON object in a tensor. CanvasError, with that hint, if it holds none."""
    found = read_json(name, text, hint)
    if not isinstance(found, dict):
        raise CanvasError(f"{name} is not a JSON object", hint)
    return found


def read_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Return the tokens of a `logit_bias` tensor, and their numbers. CanvasError if it has none."""
    example = 'send numbers by token id, such as {"17": -100}'
    found = read_object("logit_bias", text, example)
    if len(found) > MAX_BIASED:
        raise CanvasError(f"logit_bias has {len(found)} tokens", f"send at most {MAX_BIASED}")
    for token, value in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise CanvasError(f"logit_bias names {token!r}, which is not a token id", example)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CanvasError(f"logit_bias of token {token} is {value!r}", example)
    # The order must not decide the last bits.
    return tuple(sorted((int(token), float(value)) for token, value in found.items()))


def _check_stop_count(count: int) -> None:
    if count > MAX_STOPS:
        raise CanvasError(f"stop contains {count} strings", f"send at most {MAX_STOPS}")


def check_messages(text: str) -> list[dict[str, Any]]:
    """Return the chat in a `messages` tensor. CanvasError names the message that is wrong."""
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


def read_template(text: str) -> dict[str, Any]:
    """Return the variables in a `template` tensor. CanvasError unless it is a JSON object."""
    return read_object("template", text, 'send {"enable_thinking": true}')
