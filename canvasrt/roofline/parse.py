"""Parses the builder's list of an engine's kernels.

With a profiling verbosity of DETAILED, TensorRT and TensorRT-RTX print the list as one VERBOSE message: one line per
kernel, in the order in which kernels run, profile after profile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from canvasrt.errors import CanvasError
from canvasrt.roofline.dims import Dim

HEADING = "Layers:"

_KERNEL = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>|.*?\})\],"
    r"(?: Constants: \[(?P<constants>|.*?\})\],)? Outputs: \[(?P<outputs>|.*?\})\](?:,(?P<rest>.*))?$"
)
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<dims>[\d,-]*)\],"
    r".*?Datatype: (?P<format>[\w -]+)"
)
# Before TensorRT 11, the dtype is a word of the tensor's format; before 10, the format's field has a different name.
_OLD_DTYPES = {"FP32": "Float", "FP16": "Half", "BF16": "BFloat16"}
_OLD_DTYPE = re.compile(r"\b(?:BF|FP|Int)\d+\b")
_TACTIC = re.compile(r"TacticName: (\S*?), ")
_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
# Suffixes of names: the profile's number, which the first profile omits; and numbers that TensorRT's compiler, Myelin,
# adds.
_PROFILE = re.compile(r" \[profile (\d+)\]")
_MYELIN = re.compile(r"_myl(\d+)(_\d+)?$")

UNRESOLVED = -1


@dataclass(frozen=True)
class KernelTensor:
    """An input, constant or output of a kernel. `read` is the number of elements that the kernel reads; None if it
    reads all of them."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    read: Dim | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel. `nodes`: names of the graph nodes that it computes. `tactic`: Myelin's name of the kernel."""

    name: str
    kind: str
    inputs: tuple[KernelTensor, ...]
    constants: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]
    tactic: str
    nodes: tuple[str, ...]

    @property
    def tensors(self) -> tuple[KernelTensor, ...]:
        """Everything that the kernel reads or writes."""
        return (*self.inputs, *self.constants, *self.outputs)


def is_kernel_list(message: str) -> bool:
    """Return whether a message of the builder is the kernel list."""
    return message.startswith(HEADING)


def parse(message: str) -> list[list[Kernel]]:
    """Return one list of kernels per optimization profile, in order. Sizes that depend on the call are −1.

    Raises CanvasError for a line that cannot be parsed, since other versions of the builder may print it differently.
    """
    lines = [line for line in message.split("\n\n")[0].splitlines() if line.startswith("Name: ")]
    read = [_kernel(line) for line in lines]
    # Only kernels that are named after graph nodes state their profile. Every other kernel shares its Myelin number
    # with such a kernel, and so has the same profile.
    known = {
        name: profile
        for kernel, profile in read
        if profile is not None and (name := _program(kernel)) is not None
    }
    numbers = [
        known.get(_program(kernel) or "", 0) if profile is None else profile
        for kernel, profile in read
    ]
    programs: list[list[Kernel]] = [[] for _ in range(1 + max(numbers, default=0))]
    for (kernel, _), number in zip(read, numbers, strict=True):
        programs[number].append(kernel)
    return programs


def _program(kernel: Kernel) -> str | None:
    found = _MYELIN.search(kernel.name)
    return found[1] if found else None


def _kernel(line: str) -> tuple[Kernel, int | None]:
    """Return the kernel in a line, and the number of its profile, or None if the line states no profile."""
    profile = _PROFILE.search(line)
    found = _KERNEL.match(_PROFILE.sub("", line))
    if found is None:
        raise CanvasError(
            f"cannot parse a line of the builder's kernel list: {line[:120]}",
            "build with the version of TensorRT or TensorRT-RTX in constraints.txt",
        )
    rest = found["rest"] or ""
    tactic = _TACTIC.search(rest + " ")
    kernel = Kernel(
        found["name"],
        found["kind"],
        _tensors(found["inputs"]),
        _tensors(found["constants"] or ""),
        _tensors(found["outputs"]),
        tactic[1] if tactic else "",
        tuple(_NODE.findall(rest)),
    )
    return kernel, int(profile[1]) if profile else None


def _tensors(text: str) -> tuple[KernelTensor, ...]:
    return tuple(
        KernelTensor(
            found["name"],
            _dtype(found["format"]),
            tuple(map(int, filter(None, found["dims"].split(",")))),
        )
        for found in _TENSOR.finditer(text)
    )


def _dtype(text: str) -> str:
    """Return the dtype from text such as `Half`, `Row major linear FP32`, or `Channel major FP16 format where
    channel`."""
    named = _OLD_DTYPE.search(text)
    word = named[0] if named else text.split()[-1]
    return _OLD_DTYPES.get(word, word)


def graph_names(name: str) -> list[str]:
    """Return a tensor's possible names in the graph, from the full name to the shortest: `layer_0/linear.1_83_myl3` may
    be `layer_0/linear`.

    In `new_key_0` and `layer_0/add_264_myl3`, the number is part of the name.
    """
    found = [name]
    for suffix in (r"_myl\d+(@\d+)?$", r"_\d+$", r"\.\d+$"):
        shorter = re.sub(suffix, "", found[-1])
        if shorter != found[-1]:
            found.append(shorter)
    return found
