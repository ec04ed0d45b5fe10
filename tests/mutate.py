"""Breaks the product on purpose, one change at a time, and checks that tests of `make test` fail.

`python tests/mutate.py` prints one row per change, and exits with 1 if all tests pass under a change. With words as
arguments, it tries only changes whose description or file contains one of the words. It is not part of `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = ("export", "build", "runtime", "containers")
GRAPHS = "tests/export/test_graph_parity.py"
ODD = (GRAPHS, "-k", "odd-37")
WIDE = (GRAPHS, "-k", "wide_heads-40")
VISION = ("tests/export/test_vision.py",)
SAMPLER = ("tests/export/test_sampler.py",)

# A description, the file, a text in it, the replacement, and the tests that should fail. One change is missing on
# purpose: without the normalisation of the router's weights, results are the same, since a norm follows the experts.
CHANGES: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("sign of RoPE", "export/layers", "[-second, first]", "[second, first]", ODD),
    ("frequencies of full layers", "export/layers", "/ layer.head_dim\n", "/ (2 * turning)\n", ODD),
    (
        "causal mask excludes the token itself",
        "export/layers",
        "key_positions <= queries",
        "key_positions < queries",
        ODD,
    ),
    (
        "window one too long",
        "export/layers",
        "key_positions < window",
        "key_positions <= window",
        ODD,
    ),
    (
        "canvas is causal",
        "export/layers",
        "seen | ~causal[:, None, None]",
        "seen | causal[:, None, None]",
        ODD,
    ),
    (
        "empty cache slots are seen",
        "export/layers",
        "& (key_positions >= 0)",
        "& (key_positions >= -1)",
        (GRAPHS, "-k", "padding"),
    ),
    (
        "images are causal",
        "export/layers",
        "(groups[:, :, None] == key_groups) &",
        "(groups[:, :, None] < key_groups) &",
        VISION,
    ),
    ("attention scale, fused", "export/layers", "mask, scale=1.0", "mask, scale=0.9", ODD),
    (
        "attention scale, head of 512",
        "export/layers",
        "rows @ key.transpose(2, 3)",
        "0.9 * rows @ key.transpose(2, 3)",
        WIDE,
    ),
    (
        "values normed with the keys' scale",
        "export/layers",
        "value = keys if self.shares_kv else states[:, self.heads + kv_heads :]",
        "value = keys * self.k_norm.weight",
        ODD,
    ),
    ("exact GELU for tanh", "export/layers", 'approximate="tanh"', 'approximate="none"', ODD),
    (
        "encoder's scalar for the canvas",
        "export/body",
        "torch.where(causal, self.encoder_scalar",
        "torch.where(causal | True, self.encoder_scalar",
        ODD,
    ),
    (
        "decoder's scalar for clean tokens",
        "export/body",
        "self.encoder_scalar, self.decoder_scalar)",
        "self.decoder_scalar, self.decoder_scalar)",
        ODD,
    ),
    (
        "norms around the experts swapped",
        "canvasrt/checkpoints/weight_names",
        '"pre_experts_norm": "pre_feedforward_layernorm_2"',
        '"pre_experts_norm": "pre_feedforward_layernorm"',
        ODD,
    ),
    ("router's root of the width", "export/moe", "self.scale * self.root", "self.scale", ODD),
    ("scale of each expert dropped", "export/moe", "weights * scales", "weights", ODD),
    (
        "tokens in the next slot",
        "export/moe",
        "(queue[:, :, None] <= slots.to(torch.int32))",
        "(queue[:, :, None] < slots.to(torch.int32))",
        (GRAPHS, "-k", "capacity"),
    ),
    (
        "load one too low",
        "export/moe",
        "queue[-1:, : self.experts]",
        "queue[-1:, : self.experts] - 1",
        (GRAPHS, "-k", "capacity"),
    ),
    (
        "softcap of 29",
        "export/head",
        "torch.tanh(raw.to(torch.float32) / self.softcap) * self.softcap",
        "torch.tanh(raw.to(torch.float32) / 29) * 29",
        ODD,
    ),
    (
        "embedding scale of the signal",
        "export/head",
        "soft.to(hidden.dtype) * self.embed_scale",
        "soft.to(hidden.dtype)",
        ODD,
    ),
    (
        "no self-conditioning",
        "export/head",
        "rms_norm(embedded + signal, self.eps)",
        "rms_norm(embedded, self.eps)",
        ODD,
    ),
    ("entropy's sign", "export/head", "total.log() - (mass", "total.log() + (mass", ODD),
    (
        "own entropy counts against the bound",
        "export/head",
        "ordered.cumsum(dim=-1) - ordered <= bound",
        "ordered.cumsum(dim=-1) <= bound",
        ODD,
    ),
    (
        "accepted and renoised swapped",
        "export/head",
        "torch.where(accepted, draw(kept, uniforms, self.grid), noise)",
        "torch.where(accepted, noise, draw(kept, uniforms, self.grid))",
        ODD,
    ),
    (
        "draw one token late",
        "export/head",
        "row * columns + column",
        "row * columns + column + 1",
        SAMPLER,
    ),
    (
        "x and y of a patch swapped",
        "export/vision",
        "rotate(across, cos[..., 0, :], sin[..., 0, :])",
        "rotate(across, cos[..., 1, :], sin[..., 1, :])",
        VISION,
    ),
    (
        "uniforms of half the range",
        "runtime/noise",
        "(raw[:length] >> np.uint64(40))",
        "(raw[:length] >> np.uint64(41))",
        ("tests/runtime/test_noise.py",),
    ),
    (
        "a sliding layer keeps one key more",
        "runtime/kv_cache",
        "min(self.length, self._window - 1)",
        "min(self.length, self._window)",
        ("tests/runtime/test_kv_cache.py",),
    ),
    (
        "a parameter's lowest value is let in",
        "runtime/sampling_params",
        '"temperature of the first step", above_least=True',
        '"temperature of the first step"',
        ("tests/runtime/test_sampling_params.py",),
    ),
    (
        "a format's own capability lacks it",
        "canvasrt/formats",
        "if capability >= each.capability",
        "if capability > each.capability",
        ("tests/canvasrt/test_formats.py", "tests/canvasrt/test_targets.py"),
    ),
    (
        "a manifest may name files outside its bundle",
        "canvasrt/bundle",
        ' or ".." in parts',
        "",
        ("tests/canvasrt/test_bundle.py",),
    ),
    (
        "a manifest's digest is not checked",
        "canvasrt/bundle",
        'data.get("digest") != _digest(data) or ',
        "",
        ("tests/canvasrt/test_bundle.py",),
    ),
    (
        "a pass takes the width below the needed one",
        "canvasrt/pass_shapes",
        "self.min <= size <= self.max",
        "self.min <= size < self.max",
        ("tests/canvasrt/test_pass_shapes.py", "tests/build/test_profile_ranges.py"),
    ),
    (
        "thoughts are sent as the answer",
        "containers/openai/parse_answer",
        '"thought" if mark[0] == THOUGHT else "call"',
        '"content" if mark[0] == THOUGHT else "call"',
        ("tests/containers/openai/test_parse_answer.py",),
    ),
    (
        "half a control token is sent",
        "containers/openai/parse_answer",
        "0 if final else _held(self._text, CONTROL_TOKENS)",
        "0",
        ("tests/containers/openai/test_parse_answer.py",),
    ),
    (
        "a replica has a cache for one engine only",
        "containers/package/sizes",
        "round(2.2 * total)",
        "round(1.1 * total)",
        ("tests/containers/package/test_sizes.py",),
    ),
    ("pixels not centred", "export/vision", "2 * (pixel_values - 0.5)", "2 * pixel_values", VISION),
    (
        "any key opens a server",
        "containers/openai/auth",
        "if not any(found)",
        "if not found",
        ("tests/containers/openai/test_openai_errors.py", "-k", "keys"),
    ),
    (
        "a page without an Origin header may post",
        "containers/openai/origin",
        ' or b"sec-fetch-site" in headers',
        "",
        ("tests/faults/test_ports.py", "-k", "page or hosts"),
    ),
    (
        "a suffix of the host is enough",
        "containers/openai/origin",
        "(host := _host(headers)) not in self._hosts",
        "not any(_host(headers).endswith(each) for each in self._hosts)",
        ("tests/faults/test_ports.py", "-k", "page or hosts"),
    ),
    (
        "control tokens of a template's text are not marked",
        "runtime/chat_template",
        "nodes.TemplateData(self._control.mark(node.data), lineno=node.lineno)",
        "node",
        ("tests/faults/test_forged_turns.py", "-k", "own_text"),
    ),
    (
        "the beginning of a stop string is sent",
        "containers/triton/stops",
        "self._borders[s]) for s in self._stops), default=0)",
        "self._borders[s]) for s in ()), default=0)",
        ("tests/containers/triton/test_stops.py",),
    ),
    (
        "callers do not take turns",
        "runtime/schedule",
        "return self._turns[each.owner], each.place",
        "return 0.0, each.place",
        ("tests/runtime/test_schedule.py",),
    ),
    (
        "a shared pass has the first width",
        "canvasrt/pass_shapes",
        "self.batch_rows, self.widths[-1]",
        "self.batch_rows, self.widths[0]",
        ("tests/canvasrt/test_pass_shapes.py",),
    ),
    (
        "strings of a manifest may hold control characters",
        "canvasrt/bundle",
        "if not text.isprintable()",
        "if not text",
        ("tests/canvasrt/test_bundle.py", "tests/faults/test_hostile_files.py"),
    ),
    (
        "Triton stops before the front end's requests end",
        "containers/serve/supervisor",
        "finished = self.front.drain(grace, force)",
        "finished = self.server.stop(force=_at_once()) and self.front.drain(grace, force)",
        ("tests/containers/serve/test_supervised.py", "-k", "under_load"),
    ),
    (
        "half a line stays in a batch's journal",
        "containers/batch/journal",
        "os.ftruncate(self._file.fileno(), place)",
        "None",
        ("tests/containers/batch/test_lines.py",),
    ),
    (
        "own entropy counts against the bound on the host",
        "runtime/host_sampler",
        "np.cumsum(ordered, dtype=np.float32) - ordered <=",
        "np.cumsum(ordered, dtype=np.float32) <=",
        ("tests/runtime/answers/test_infill.py", "-k", "reference"),
    ),
]


def noticed(file: str, old: str, new: str, tests: tuple[str, ...]) -> bool:
    """Return whether `tests` fail on a copy of the package where `old` in `file`.py is replaced by `new`."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "canvasrt"
        shutil.copytree(ROOT / "canvasrt", package)
        for stage in STAGES:
            shutil.copytree(ROOT / stage, package / stage)
        source = package / f"{file.removeprefix('canvasrt/')}.py"
        text = source.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{file}.py holds {old!r} {text.count(old)} times, not once")
        source.write_text(text.replace(old, new))
        # The changed copy must come before the package in the working directory, in servers that tests start, too. The
        # working directory is last, for `bench`.
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONSAFEPATH": "1"}
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not acceptance", *tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout + done.stderr)
        return done.returncode == 1


def main() -> None:
    """Try every change, or those that the command line names."""
    words = sys.argv[1:]
    chosen = [
        row for row in CHANGES if not words or any(each in " ".join(row[:2]) for each in words)
    ]
    # Tests that fail without any change prove nothing.
    sound: dict[tuple[str, ...], bool] = {}
    missed = 0
    print("| change | in | noticed |\n| --- | --- | --- |")
    for what, file, old, new, tests in chosen:
        if tests not in sound:
            sound[tests] = not noticed(file, old, old, tests)
        found = sound[tests] and noticed(file, old, new, tests)
        missed += not found
        said = "yes" if found else "**no**" if sound[tests] else "**its tests fail without it**"
        print(f"| {what} | `{file}.py` | {said} |", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
