"""Writes a checkpoint of a real shape with random weights.

`python -m bench.synthetic --shape released --layers 6 --format nvfp4 -o DIR`
"""

from __future__ import annotations

import argparse

from canvasrt.export.synthetic import SHAPES, WEIGHT_FORMATS, write_random_checkpoint


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-o", "--output", required=True, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="300m", help="default: 300m")
    parser.add_argument("--layers", type=int, help="default: the shape's own number")
    parser.add_argument("--format", choices=WEIGHT_FORMATS, default="bf16", help="default: bf16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_random_checkpoint(args.output, args.shape, args.layers, args.seed, args.format)


if __name__ == "__main__":
    main()
