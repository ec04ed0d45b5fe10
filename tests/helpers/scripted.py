"""A model for the real server that answers with the exact tokens of a script.

Each of its two graphs has a few nodes. The first counts certain tokens in the cache; the second answers with the
script's canvas of that number. So the answer depends on the number of tool results in the prompt, and on the block. A
request selects its script by `entropy_bound`, which has no other effect here.
"""

from __future__ import annotations

import importlib.util
import string
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Core

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.checkpoints.config import Layer, SamplerDefaults
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from tests.helpers.configs import CONFIG

if TYPE_CHECKING:
    from openai import OpenAI

CANVAS = 256
SIZE = 8
# The tokens of Gemma 4, and `<more>`, which ends a block if another follows.
SPECIAL = (
    *(
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<|turn>",
        "<turn|>",
        "<|image>",
        "<image|>",
        "<|image|>",
    ),
    *(
        "<|channel>",
        "<channel|>",
        "<|think|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<more>"),
)
# Each of these tokens advances the script by one canvas.
COUNTED = ("<tool_response|>", "<more>")
# Tokens that end an answer. As in the released checkpoint, an answer with a call ends with the token that begins the
# result.
ENDS = ("<eos>", "<turn|>", "<|tool_response>")


def gemma_template() -> str:
    """Return DiffusionGemma's chat template, which the package `trl` contains."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is not installed: make install"
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    return (folder / "chat_templates" / "diffusion_gemma.jinja").read_text("utf-8")


def core() -> Core:
    """Return a tokenizer with one token per printable character, and Gemma's special tokens."""
    characters = ["\n", " ", *string.punctuation, *string.digits, *string.ascii_letters]
    vocab = {token: id for id, token in enumerate((*SPECIAL, *characters))}
    made = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return made


class Script:
    """The canvases of all scripts, in one list."""

    def __init__(self, scripts: Mapping[str, Sequence[str]]) -> None:
        """`scripts`: name → the first answer, the answer after one tool result, and so on.

        An answer that is longer than a canvas becomes several canvases.
        """
        tokenizer = core()
        self._begin: dict[str, int] = {}
        self.canvases: list[list[int]] = []
        more, end, pad = (tokenizer.token_to_id(each) for each in ("<more>", "<turn|>", "<pad>"))
        for name, answers in scripts.items():
            self._begin[name] = len(self.canvases)
            for answer in answers:
                ids = tokenizer.encode(answer, add_special_tokens=False).ids
                while len(ids) >= CANVAS:
                    self.canvases.append([*ids[: CANVAS - 1], more])
                    ids = ids[CANVAS - 1 :]
                self.canvases.append((ids + [end] + [pad] * CANVAS)[:CANVAS])

    def choose(self, name: str, results: int = 0) -> dict[str, float]:
        """Return the request field that selects a script. The first `results` tool results do not advance it."""
        return {"entropy_bound": float(self._begin[name] + 1 - results)}


def write_bundle(out: Path, script: Script, template: str) -> Bundle:
    """Write the graphs of the model that follows `script`, with its tokenizer."""
    tokenizer = core()
    config = replace(
        CONFIG,
        hidden_size=SIZE,
        vocab_size=tokenizer.get_vocab_size(),
        num_attention_heads=1,
        layers=(Layer("full", SIZE, 1, 1e4, 1.0),),
        canvas_length=CANVAS,
        max_position_embeddings=1 << 15,
        eos_token_ids=tuple(tokenizer.token_to_id(each) for each in ENDS),
    )
    out.mkdir(parents=True)
    (out / "tokenizer").mkdir()
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    (out / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    (out / "tokenizer" / "chat_template.jinja").write_text(template)
    table = np.zeros((config.vocab_size, SIZE), np.float32)
    for token in COUNTED:
        table[tokenizer.token_to_id(token)] = 1 / np.sqrt(SIZE)  # undone by the runtime
    (out / "embedding.bin").write_bytes(table.tobytes())
    onnx.save(_body(), out / "body_0.onnx")
    onnx.save(_head(script.canvases), out / "head.onnx")
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    write_manifest(
        out,
        kind="graphs",
        made_from={},
        options={"precision": "fp32"},
        model=config,
        sampler=SamplerDefaults(entropy_bound=1.0),
        segments=[
            {"name": "body_0", "file": "body_0.onnx", "layers": [0]},
            {"name": "head", "file": "head.onnx"},
        ],
        embedding={"file": "embedding.bin", "dtype": "float32", "shape": list(table.shape)},
        tokenizer=[f"tokenizer/{name}" for name in files],
    )
    return load_bundle(out)


def _value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def _body() -> onnx.ModelProto:
    """Return a body whose keys are the embeddings, and whose hidden states are the sum of the cached keys."""
    node, real = helper.make_node, TensorProto.FLOAT
    nodes = [
        node("Unsqueeze", ["hidden", "one"], ["new_key_0"]),
        node("Identity", ["new_key_0"], ["new_value_0"]),
        node("ReduceSum", ["past_key_0", "middle"], ["counted"], keepdims=0),
        node("Unsqueeze", ["counted", "one"], ["wide"]),
        node("Mul", ["hidden", "zero"], ["nothing"]),
        node("Add", ["nothing", "wide"], ["hidden_out"]),
        node("Identity", ["idle"], ["load"]),
    ]
    inputs = [
        _value("hidden", real, "batch", "length", SIZE),
        _value("past_key_0", real, "batch", 1, "octets", 8, SIZE),
        # The runtime feeds these inputs of experts, although there are no experts.
        *(_value(name, TensorProto.INT64, name) for name in ("slots", "gate_slots", "gate_queues")),
    ]
    outputs = [
        _value("hidden_out", real, "batch", "length", SIZE),
        _value("load", TensorProto.INT64, 1),
        _value("new_key_0", real, "batch", 1, "length", SIZE),
        _value("new_value_0", real, "batch", 1, "length", SIZE),
    ]
    constants = [
        _constant("one", np.array([1])),
        _constant("middle", np.array([1, 2, 3])),
        _constant("zero", np.zeros((), np.float32)),
        _constant("idle", np.zeros(1, np.int64)),
    ]
    return _model(nodes, inputs, outputs, constants)


def _head(canvases: Sequence[Sequence[int]]) -> onnx.ModelProto:
    """Return a head that answers with the canvas whose number is `entropy_bound` plus the count."""
    node, real, whole = helper.make_node, TensorProto.FLOAT, TensorProto.INT64
    nodes = [
        node("Slice", ["hidden", "zeros", "ones", "axes"], ["counts"]),
        node("Squeeze", ["counts", "axes"], ["count"]),
        node("Add", ["count", "entropy_bound"], ["after"]),
        node("Sub", ["after", "unit"], ["number"]),
        node("Round", ["number"], ["rounded"]),
        node("Cast", ["rounded"], ["index"], to=whole),
        node("Gather", ["script", "index"], ["argmax"]),
        node("Identity", ["argmax"], ["canvas"]),
        node("Cast", ["argmax"], ["real"], to=real),
        node("Mul", ["real", "nothing"], ["entropy"]),
        node("GreaterOrEqual", ["argmax", "none"], ["accepted"]),
        node("Identity", ["hidden"], ["next_hidden"]),
    ]
    inputs = [
        _value("hidden", real, "batch", "length", SIZE),
        _value("temperature", real, "batch"),
        _value("entropy_bound", real, "batch"),
        _value("uniforms", real, "batch", "length"),
        _value("noise", whole, "batch", "length"),
    ]
    outputs = [
        _value("canvas", whole, "batch", "length"),
        _value("argmax", whole, "batch", "length"),
        _value("entropy", real, "batch", "length"),
        _value("accepted", TensorProto.BOOL, "batch", "length"),
        _value("next_hidden", real, "batch", "length", SIZE),
    ]
    constants = [
        _constant("script", np.array(canvases, np.int64)),
        _constant("zeros", np.array([0, 0])),
        _constant("ones", np.array([1, 1])),
        _constant("axes", np.array([1, 2])),
        _constant("unit", np.ones((), np.float32)),
        _constant("nothing", np.zeros((), np.float32)),
        _constant("none", np.zeros((), np.int64)),
    ]
    return _model(nodes, inputs, outputs, constants)


def _model(nodes: list, inputs: list, outputs: list, constants: list) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "scripted", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


class Served(NamedTuple):
    """A running server, and its front end."""

    server: Server
    front: FrontEnd


@contextmanager
def serving(bundle: Bundle, **options: object) -> Iterator[Served]:
    """Serve a bundle with a real Triton and a real front end."""
    with (
        tempfile.TemporaryDirectory() as logs,
        repository_of(bundle) as repository,
        Server(repository, Settings(ports=Ports(0, 0, 0), log=f"{logs}/triton.log")) as server,
        FrontEnd.over(server, FrontOptions(port=0, **options)) as front,  # type: ignore[arg-type]
    ):
        yield Served(server, front)


@contextmanager
def client_of(served: Served) -> Iterator[OpenAI]:
    """Provide the real client without retries, so that failures are reported at once."""
    from openai import OpenAI  # some GPU machines lack it

    with OpenAI(base_url=served.front.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
