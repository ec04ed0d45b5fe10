"""The served models' inputs and outputs, and conversions between values and tensors, for the models, the front end and
the client."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.runtime.sampling_params import PARAMETERS

ANSWER_MODEL = "canvasrt"
STREAM_MODEL = "canvasrt_stream"
MAX_IMAGES = 1024
MAX_CANVAS = 1 << 20  # maximum characters of JSON
MAX_GRAMMAR = 400_000  # maximum characters of JSON: up to six for each byte of a schema, which has at most 64 KB
MAX_BIASED = 1024  # maximum number of tokens with a bias
MAX_LISTED = 128  # maximum number of tokens to list with each log-probability, as in vLLM
# Maximum log-probabilities of echoed prompts in all answers: enough for 262,144 tokens and one alternative to each.
MAX_ECHOED = 1 << 19
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000  # maximum number of strings, and of characters in each

# Request parameters. If ERRORS is set, the decoupled model reports an error as an event ERROR_EVENT, whose text is JSON
# with code and message. Triton's streams have no error codes; the option that adds them (triton_grpc_error) can crash
# Triton.
ERRORS, ERROR_EVENT = "canvasrt_errors", "error"
# Set by the front end: the caller's name, and the total number of answers that the caller requested.
OWNER, ANSWERS = "canvasrt_owner", "canvasrt_answers"
# Arrival time of the request at the front end, in microseconds of the machine's monotonic clock.
ARRIVED = "canvasrt_arrived"
# A request with this parameter cancels a call of the decoupled model.
CANCEL_PARAMETER = "triton_canvasrt_cancel"
HINT = ". Hint: "  # separates message and hint in an error reply

ONE, ANY = (1,), (-1,)  # shapes of one value, and of a list of any length
_NUMPY = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BYTES": np.object_,
}


@dataclass(frozen=True)
class Tensor:
    """One input or output. A dimension of -1 can have any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    about: str

    @property
    def config_type(self) -> str:
        """The type's name in a model configuration: TYPE_STRING for text, otherwise TYPE_ plus the datatype."""
        return "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"

    def encode(self, value: Any) -> np.ndarray:
        """Return a value as an array. Raises CanvasError if the value does not fit the type."""
        values = value if self.shape == ANY else [value]
        if self.datatype == "BYTES":
            # dtype object, because NumPy's bytes type strips trailing zeros.
            return np.array(
                [each if isinstance(each, bytes) else str(each).encode() for each in values],
                np.object_,
            )
        try:
            array = np.array(values)
            made = array.astype(_NUMPY[self.datatype])
            whole = self.datatype == "FP32" or array.size == 0 or np.array_equal(array, made)
        except (OverflowError, ValueError, TypeError):
            whole = False
        if not whole:
            raise CanvasError(
                f"{self.name} {value!r} does not fit its type, {self.datatype}",
                f"give another value for {self.name}",
            )
        return made

    def decode(self, array: np.ndarray) -> Any:
        """Return an array's value or list of values. Raises CanvasError for text that is not UTF-8."""
        if self.datatype == "BYTES":
            items: list[Any] = [self._text(item) for item in array]
        elif self.datatype == "FP32":
            # The shortest decimal: 0.1 and not 0.10000000149.
            items = [float(str(item)) for item in array]
        else:
            items = array.tolist()
        return items if self.shape == ANY else items[0]

    def _text(self, item: Any) -> str:
        if isinstance(item, str):
            return item
        try:
            return bytes(item).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CanvasError(
                f"{self.name} is not UTF-8: {error.reason} at byte {error.start}",
                f"encode {self.name} as UTF-8",
            ) from None

    def to_wire(self, array: np.ndarray) -> bytes:
        """Return an array as bytes in Triton's raw binary format."""
        if self.datatype == "BYTES":
            return b"".join(len(item).to_bytes(4, "little") + item for item in array)
        return array.tobytes()

    def from_wire(self, raw: bytes) -> Any:
        """Return the value of an array in Triton's raw binary format."""
        if self.datatype != "BYTES":
            return self.decode(np.frombuffer(raw, _NUMPY[self.datatype]))
        items, begin = [], 0
        while begin < len(raw):
            end = begin + 4 + int.from_bytes(raw[begin : begin + 4], "little")
            items.append(raw[begin + 4 : end])
            begin = end
        return self.decode(np.array(items, np.object_))


PROMPTS = (
    Tensor("prompt", "BYTES", ONE, "one user message, wrapped in the chat template"),
    Tensor("messages", "BYTES", ONE, "a chat: a JSON list of `{role, content}`, as one string"),
    Tensor("prompt_ids", "INT32", ANY, "token ids, used as they are, without a template"),
)
OPTIONS = tuple(Tensor(each.name, each.datatype, ONE, each.about) for each in PARAMETERS)
_INPUTS = (
    *PROMPTS,
    Tensor("raw", "BOOL", ONE, "use `prompt` as it is, without the chat template"),
    Tensor(
        "template", "BYTES", ONE, "variables of the chat template, such as `tools`: a JSON object"
    ),
    Tensor("prefix", "BYTES", ONE, "how the answer begins; the model continues it"),
    Tensor(
        "images", "BYTES", ANY, "image files or their data URLs, one for each image in the prompt"
    ),
    Tensor(
        "image_tokens",
        "INT32",
        ANY,
        "maximum tokens per image, 70, 140 or 280: one number for all images, or one per image",
    ),
    *OPTIONS,
    Tensor(
        "logprob_token_ids",
        "INT32",
        ANY,
        "tokens to list with each log-probability, instead of the likeliest tokens",
    ),
    Tensor(
        "logit_bias",
        "BYTES",
        ONE,
        "numbers to add to tokens' logits: a JSON object, keyed by token id",
    ),
    Tensor("canvas", "BYTES", ONE, "the initial, fixed or allowed tokens of positions, as JSON"),
    Tensor(
        "stop", "BYTES", ANY, "strings that end the answer; the answer is cut before such a string"
    ),
    Tensor(
        "stop_token_ids",
        "INT32",
        ANY,
        "tokens that end the answer, in addition to the checkpoint's end tokens",
    ),
    Tensor(
        "ignore_eos",
        "BOOL",
        ONE,
        "no token ends the answer, so it has the maximum number of tokens",
    ),
    Tensor(
        "echo",
        "BOOL",
        ONE,
        "begin `text` with the prompt, and `logprobs` with the log-probabilities of the prompt's tokens",
    ),
    Tensor("control", "BOOL", ONE, "keep the tokens around thoughts and tool calls in the text"),
    Tensor(
        "infill",
        "BYTES",
        ONE,
        "a text with gaps such as `{4}`; `text` then tells, as JSON, what fills the gaps",
    ),
    Tensor(
        "grammar",
        "BYTES",
        ONE,
        "a schema, a regex or a grammar that the answer must follow, as JSON",
    ),
    Tensor(
        "questions",
        "BYTES",
        ONE,
        "closed questions as JSON; `text` then holds their answers, as JSON",
    ),
    Tensor(
        "tokenize",
        "BYTES",
        ONE,
        "only encode or decode the prompt: options as JSON; `text` then holds the prompt's text, as JSON",
    ),
)
_DRAFTS = Tensor("drafts", "BOOL", ONE, "also send the canvas after every denoising step")
_RESULT = (
    Tensor(
        "text",
        "BYTES",
        ONE,
        "in `final`, the whole answer; in other events, a draft or the new text",
    ),
    Tensor(
        "token_ids",
        "INT32",
        ANY,
        "the tokens of `text`, including the token that ends the sequence",
    ),
    Tensor("prompt_token_ids", "INT32", ANY, "the prompt's tokens; empty before `final`"),
    Tensor("finish_reason", "BYTES", ONE, "`stop`, `length` or `grammar`; empty before `final`"),
    Tensor("steps", "INT32", ANY, "denoising steps of each finished block"),
    Tensor("seed", "UINT64", ONE, "the seed that was used"),
    Tensor("cached_tokens", "INT32", ONE, "prompt tokens that came from the prefix cache"),
    Tensor(
        "logprobs", "BYTES", ONE, "the tokens' log-probabilities as JSON; empty if not asked for"
    ),
    Tensor(
        "block_scores",
        "BYTES",
        ONE,
        "each finished block's score, and how often the block was redone, as JSON; only if asked for",
    ),
    Tensor(
        "stop_string",
        "BYTES",
        ONE,
        "the string of `stop` that ended the answer; only if a string did",
    ),
)
_PROGRESS = (
    Tensor("event", "BYTES", ONE, "`draft`, `settled`, `block` or `final`"),
    Tensor("block", "INT32", ONE, "index of the event's block, from 0"),
    Tensor("step", "INT32", ONE, "denoising steps done in the block"),
)
_CANVAS = Tensor("canvas", "BYTES", ONE, "the canvas of a `draft`, as JSON; no other event has it")


def inputs_of(model: str) -> tuple[Tensor, ...]:
    """Return the inputs of the answer model or the stream model; Triton treats all as optional."""
    return (*_INPUTS, _DRAFTS) if model == STREAM_MODEL else _INPUTS


def outputs_of(model: str) -> tuple[Tensor, ...]:
    """Return the outputs of the answer model or the stream model."""
    return (*_PROGRESS, *_RESULT, _CANVAS) if model == STREAM_MODEL else _RESULT


# The inputs and outputs of both models, keyed by name: the decoupled model has all of them.
INPUTS = {tensor.name: tensor for tensor in inputs_of(STREAM_MODEL)}
OUTPUTS = {tensor.name: tensor for tensor in outputs_of(STREAM_MODEL)}


@dataclass(frozen=True)
class TritonAnswer:
    """One answer. Each field is the output of the same name."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    steps: list[int]
    seed: int
    cached_tokens: int
    logprobs: str
    block_scores: str = field(default="", kw_only=True)  # only if requested
    stop_string: str = field(default="", kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a key per field."""
        return asdict(self)


@dataclass(frozen=True)
class StreamEvent(TritonAnswer):
    """One event of a stream. In the last event, `text` and `token_ids` hold the whole answer; in a draft event, the
    draft; in other events, the new part of the answer. `canvas` is JSON; it is empty except in drafts."""

    event: str
    block: int
    step: int
    canvas: str = ""
