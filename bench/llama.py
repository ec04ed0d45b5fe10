"""The INT4 layers on a CPU against llama.cpp: `python -m bench.llama -o DIR`.

Both sides have the same random weights, codes and scales included, and run a prompt through the same layers; llama.cpp
calls the architecture `gemma4`. Needs `pip install xllamacpp gguf`, which canvasrt does not. `--library FILE` gives
other builds of libllama to compare with, such as one that knows this processor.

Each side is a process of its own, and they take turns within each round. Results go to `DIR/llama.json` and
`DIR/llama.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.build_full import memory_of
from bench.llama_library import Llama, find_library
from canvasrt import extras
from canvasrt.bundle import load_bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import EncodeInput

OURS = "canvasrt"
VOCABULARY = 1024  # neither side's table and head count
SIZES = (256, 512)
# Routers decide otherwise where two experts are nearly equal, so single tokens may differ by much more.
LEAST_COSINE = 0.99


class Contender(Protocol):
    """A loaded model."""

    def about(self) -> dict[str, Any]:
        """Return what is worth knowing about it."""

    def forget(self) -> None:
        """Empty the cache."""

    def encode(self, tokens: np.ndarray) -> None:
        """Run all layers over the tokens, `[n]`."""

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """Return the normalised states after the last layer, float32 `[n, hidden_size]`."""


class Ours:
    """canvasrt's engines for a CPU."""

    def __init__(self, bundle: Path, threads: int) -> None:
        self._model = open_model(bundle, threads, check=False)
        self._row = self._model.new_row()

    def about(self) -> dict[str, Any]:
        return {"onnxruntime": extras.version("onnxruntime")}

    def forget(self) -> None:
        self._row = self._model.new_row()

    def encode(self, tokens: np.ndarray) -> None:
        self._model.encode([EncodeInput(self._row, tokens)])

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        found: list[np.ndarray] = []

        def keep(states: np.ndarray) -> bool:
            found.append(states.copy())
            return True

        self._model.encode([EncodeInput(self._row, tokens, keep=keep, whole=True)])
        square = np.mean(found[0] ** 2, -1, keepdims=True)
        return found[0] / np.sqrt(square + np.float32(self._model.config.rms_norm_eps))


class Theirs(Llama):
    """llama.cpp."""

    def about(self) -> dict[str, Any]:
        return {"system": self.system, "backend": self.backend, "weights": self.buffers}


@dataclass(frozen=True)
class Remote:
    """A side in a process of its own."""

    process: Any
    pipe: Connection

    @classmethod
    def start(cls, make: Callable[..., Contender], *arguments: Any) -> Remote:
        """Start the process and load the model."""
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call one of `_serve`'s functions there."""
        self.pipe.send((what, arguments))
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer. The first, of loading, is `[wall, CPU]` seconds."""
        found = self.pipe.recv()
        if isinstance(found, CanvasError):
            raise found
        return found

    def stop(self) -> None:
        self.pipe.close()
        self.process.join()


def _serve(pipe: Connection, make: Callable[..., Contender], arguments: Sequence[Any]) -> None:
    """Load a side, and answer until the pipe is closed."""
    made: list[Contender] = []

    def timed(work: Callable[[], Any]) -> list[float]:
        start = time.perf_counter(), time.process_time()
        work()
        return [time.perf_counter() - start[0], time.process_time() - start[1]]

    def encode(tokens: np.ndarray) -> list[float]:
        made[0].forget()
        return timed(lambda: made[0].encode(tokens))

    def hidden(tokens: np.ndarray) -> np.ndarray:
        made[0].forget()
        return made[0].hidden(tokens)

    try:
        pipe.send(timed(lambda: made.append(make(*arguments))))
        known: dict[str, Callable[..., Any]] = {
            "encode": encode,
            "hidden": hidden,
            "about": made[0].about,
        }
        while True:
            what, given = pipe.recv()
            pipe.send(known[what](*given))
    except CanvasError as error:
        pipe.send(error)
    except EOFError:
        pass


@dataclass
class Report:
    """Everything that was measured."""

    options: dict[str, Any]
    multiply_adds: int  # per token, with weights
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_markdown(self) -> str:
        """Return the tables: ratios, then what each side is."""
        lines = [
            "| against | threads | tokens | wall time, ratio | CPU time, ratio | giga multiply-adds per CPU second, theirs | ours |",
            "| --- | ---: | ---: | --- | --- | ---: | ---: |",
        ]
        for row in self.rows:
            ratios = [
                f"{statistics.median(each):.2f} ({min(each):.2f} – {max(each):.2f})"
                for each in (row["wall"], row["cpu"])
            ]
            rates = [f"{row['rate']:.0f}", f"{row['our_rate']:.0f}"]
            cells = [row["against"], str(row["threads"]), str(row["tokens"]), *ratios, *rates]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            "Ratios are their time per ours: above 1, canvasrt is faster.",
            "",
            "| side | threads | loading, wall and CPU s | resident | not file-backed | cosine |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, side in self.sides.items():
            for threads, used in side["threads"].items():
                memory = [f"{each / 1e9:.2f} GB" for each in used["memory"]]
                load = " and ".join(f"{each:.1f}" for each in used["load"])
                cells = [name, threads, load, *memory, f"{used['cosine']:.5f}"]
                lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"{name}: {side['about']}" for name, side in self.sides.items())]
        return "\n".join(lines) + "\n"


def prepare(folder: Path, shape: str, layers: int) -> tuple[Path, Path, ModelConfig]:
    """Write what is missing in `folder`. Return the bundle, the GGUF file, and the model's configuration."""
    extras.require("torch", "export")
    from bench.gguf_file import write_gguf
    from canvasrt.build.plan import BuildOptions
    from canvasrt.export import synthetic
    from canvasrt.export.graphs import export_graphs
    from canvasrt.pipeline import build_all, plan_all
    from canvasrt.targets import find_target

    stem = f"{shape}-{layers}"
    checkpoint, graphs = folder / f"{stem}-checkpoint", folder / f"{stem}-graphs"
    engines, gguf = folder / f"{stem}-cpu", folder / f"{stem}.gguf"
    if not checkpoint.exists():
        synthetic.SHAPES[stem] = synthetic.SHAPES[shape] | {"vocab_size": VOCABULARY}
        synthetic.write_random_checkpoint(checkpoint, stem, layers, format="int4")
    if not engines.exists():
        export_graphs(checkpoint, graphs, layers)
        build_all(plan_all(graphs, [find_target("cpu")], engines, BuildOptions()))
    bundle = load_bundle(engines, check=False)
    config = bundle.manifest.model
    if not gguf.exists():
        embedded = open_model(engines, 1, check=False).embed(np.arange(config.vocab_size))
        write_gguf(checkpoint, config, embedded / np.float32(config.hidden_size**0.5), gguf)
    return engines, gguf, config


def multiply_adds(config: ModelConfig) -> int:
    """Return the multiply-adds with INT4 weights per token."""
    width = config.intermediate_size + config.top_k_experts * config.moe_intermediate_size
    found = 3 * config.hidden_size * width * len(config.layers)
    for layer in config.layers:
        keys = layer.num_kv_heads * (2 if layer.kind == "sliding" else 1)
        heads = 2 * config.num_attention_heads + keys
        found += config.hidden_size * layer.head_dim * heads
    return found


def measure(
    makers: dict[str, tuple[Any, ...]],
    config: ModelConfig,
    threads: int,
    rounds: int,
    report: Report,
) -> None:
    """Load every side, compare what they compute, and time them in turns."""
    remotes: dict[str, Remote] = {}
    prompts = {n: np.random.default_rng(n).integers(3, config.vocab_size, n) for n in SIZES}
    used: dict[str, dict[str, Any]] = {}
    try:
        for name, (make, *arguments) in makers.items():
            remotes[name] = Remote.start(make, *arguments, threads)
            used[name] = {"load": remotes[name].answer()}
        states = {name: each.ask("hidden", prompts[SIZES[0]]) for name, each in remotes.items()}
        for name, found in states.items():
            used[name]["cosine"] = cosine(found, states[OURS])
            if used[name]["cosine"] < LEAST_COSINE:
                raise CanvasError(
                    f"the states of {name} and {OURS} have a cosine of {used[name]['cosine']:.4f}",
                    "they do not compute the same: compare the architectures",
                )
        for prompt in prompts.values():
            report.rows += _turns(remotes, prompt, rounds, report.multiply_adds, threads)
        for name, each in remotes.items():
            used[name]["memory"] = memory_of(each.process.pid)
            about = each.ask("about")
            side = report.sides.setdefault(name, {"about": about, "threads": {}})
            side["threads"][str(threads)] = used[name]
    finally:
        for each in remotes.values():
            each.stop()


def _turns(
    remotes: dict[str, Remote], prompt: np.ndarray, rounds: int, work: int, threads: int
) -> list[dict[str, Any]]:
    """Time every side in each round; the first round warms up. Return a row per other side."""
    names = list(remotes)
    took: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            seconds = remotes[name].ask("encode", prompt)
            if number:
                took[name].append(seconds)
    medians = {name: statistics.median(cpu for _, cpu in took[name]) for name in names}
    rows = []
    for name in names:
        if name == OURS:
            continue
        ratios = [
            [a[i] / b[i] for a, b in zip(took[name], took[OURS], strict=True)] for i in range(2)
        ]
        rates = [work * len(prompt) / medians[each] / 1e9 for each in (name, OURS)]
        row = {"against": name, "threads": threads, "tokens": len(prompt), "seconds": took}
        rows.append(
            row | {"wall": ratios[0], "cpu": ratios[1], "rate": rates[0], "our_rate": rates[1]}
        )
    return rows


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the median over tokens of the cosine between two arrays `[tokens, hidden_size]`."""
    product = np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    return float(np.median(product))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder for results and models"
    )
    parser.add_argument("--shape", default="released", help="default: released")
    parser.add_argument("--layers", type=int, default=6, help="default: 6, the last of them full")
    parser.add_argument("--threads", default="1,2", help="default: 1,2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--library", type=Path, action="append", help="libllama; default: xllamacpp's"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    bundle, gguf, config = prepare(args.output, args.shape, args.layers)
    makers: dict[str, tuple[Any, ...]] = {OURS: (Ours, bundle)}
    for file in args.library or [find_library()]:
        makers[file.name.split(".")[0]] = (Theirs, file, gguf)
    options = {"shape": args.shape, "layers": args.layers, "rounds": args.rounds}
    options |= {name: extras.version(name) for name in ("onnxruntime", "xllamacpp")}
    report = Report(options, multiply_adds(config))
    for threads in map(int, args.threads.split(",")):
        measure(makers, config, threads, args.rounds, report)
    (args.output / "llama.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    (args.output / "llama.md").write_text(report.to_markdown())
    print(report.to_markdown(), end="")


if __name__ == "__main__":
    main()
