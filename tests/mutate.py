"""Breaks the export on purpose, one change at a time, and checks that the parity tests notice.

`python tests/mutate.py` prints one row per change and exits 1 if a change goes unnoticed. It is not
part of `make test`.
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
ODD = (GRAPHS, "-k", "odd-17")
WIDE = (GRAPHS, "-k", "wide_heads-25")
VISION = ("tests/export/test_vision.py", "-k", "plain")
SAMPLER = ("tests/export/test_sampler.py",)

# What is broken, the file, the text there, its replacement, and the tests that should fail.
# Not here: dropping the normalisation of the router's weights, which the norm after the experts
# cancels.
CHANGES: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("sign of RoPE", "layers", "[-second, first]", "[second, first]", ODD),
    ("frequencies of full layers", "layers", "/ layer.head_dim\n", "/ (2 * turning)\n", ODD),
    (
        "causal mask excludes the token itself",
        "layers",
        "key_positions <= queries",
        "key_positions < queries",
        ODD,
    ),
    ("window one too long", "layers", "key_positions < window", "key_positions <= window", ODD),
    (
        "canvas is causal",
        "layers",
        "seen | ~causal[:, None, None]",
        "seen | causal[:, None, None]",
        ODD,
    ),
    (
        "empty cache slots are seen",
        "layers",
        "& (key_positions >= 0)",
        "& (key_positions >= -1)",
        (GRAPHS, "-k", "padding"),
    ),
    (
        "images are causal",
        "layers",
        "(groups[:, :, None] == key_groups) &",
        "(groups[:, :, None] < key_groups) &",
        VISION,
    ),
    ("attention scale, fused", "layers", "mask, scale=1.0", "mask, scale=0.9", ODD),
    (
        "attention scale, head of 512",
        "layers",
        "rows @ key.transpose(2, 3)",
        "0.9 * rows @ key.transpose(2, 3)",
        WIDE,
    ),
    (
        "values normed with the keys' scale",
        "layers",
        "rms_norm(values, self.eps)",
        "self.k_norm(values)",
        ODD,
    ),
    ("exact GELU for tanh", "layers", 'approximate="tanh"', 'approximate="none"', ODD),
    (
        "encoder's scalar for the canvas",
        "body",
        "torch.where(causal, self.encoder_scalar",
        "torch.where(causal | True, self.encoder_scalar",
        ODD,
    ),
    (
        "decoder's scalar for clean tokens",
        "body",
        "self.encoder_scalar, self.decoder_scalar)",
        "self.decoder_scalar, self.decoder_scalar)",
        ODD,
    ),
    (
        "norms around the experts swapped",
        "weights",
        '"pre_experts_norm": "pre_feedforward_layernorm_2"',
        '"pre_experts_norm": "pre_feedforward_layernorm"',
        ODD,
    ),
    ("router's root of the width", "moe", "self.scale * self.root", "self.scale", ODD),
    ("scale of each expert dropped", "moe", "weights * scales", "weights", ODD),
    (
        "a slot too few",
        "moe",
        "place < capacity, index",
        "place < capacity - 1, index",
        (GRAPHS, "-k", "capacity"),
    ),
    (
        "load one too low",
        "moe",
        "queue[-1:, : self.experts]",
        "queue[-1:, : self.experts] - 1",
        (GRAPHS, "-k", "capacity"),
    ),
    (
        "softcap of 29",
        "head",
        "torch.tanh(raw / self.softcap) * self.softcap",
        "torch.tanh(raw / 29) * 29",
        ODD,
    ),
    (
        "embedding scale of the signal",
        "head",
        "@ self.table * self.embed_scale",
        "@ self.table",
        ODD,
    ),
    (
        "no self-conditioning",
        "head",
        "rms_norm(embedded + signal, self.eps)",
        "rms_norm(embedded, self.eps)",
        ODD,
    ),
    ("entropy's sign", "head", "total.log() - (mass", "total.log() + (mass", ODD),
    (
        "own entropy counts against the bound",
        "head",
        "ordered.cumsum(dim=-1) - ordered <= bound",
        "ordered.cumsum(dim=-1) <= bound",
        ODD,
    ),
    (
        "accepted and renoised swapped",
        "head",
        "torch.where(accepted, draw(mass, uniforms, self.grid), noise)",
        "torch.where(accepted, noise, draw(mass, uniforms, self.grid))",
        ODD,
    ),
    (
        "draw one token late",
        "head",
        "row * columns + column",
        "row * columns + column + 1",
        SAMPLER,
    ),
    (
        "x and y of a patch swapped",
        "vision",
        "rotate(across, cos[..., 0, :], sin[..., 0, :])",
        "rotate(across, cos[..., 1, :], sin[..., 1, :])",
        VISION,
    ),
    ("pixels not centred", "vision", "2 * (pixel_values - 0.5)", "2 * pixel_values", VISION),
]


def noticed(file: str, old: str, new: str, tests: tuple[str, ...]) -> bool:
    """Return whether `tests` fail on a copy of the package where `old` in export/`file`.py is
    replaced by `new`."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "canvasrt"
        shutil.copytree(ROOT / "canvasrt", package)
        for stage in STAGES:
            shutil.copytree(ROOT / stage, package / stage)
        source = package / "export" / f"{file}.py"
        text = source.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"export/{file}.py holds {old!r} {text.count(old)} times, not once")
        source.write_text(text.replace(old, new))
        # -P, or the working directory's unbroken package would come first.
        arguments = ["-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout + done.stderr)
        return done.returncode == 1


def main() -> None:
    """Try every change."""
    missed = 0
    print("| change | in | noticed |\n| --- | --- | --- |")
    for what, file, old, new, tests in CHANGES:
        found = noticed(file, old, new, tests)
        missed += not found
        print(f"| {what} | `export/{file}.py` | {'yes' if found else '**no**'} |", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
