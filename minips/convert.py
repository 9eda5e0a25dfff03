"""Convert a GGUF file into a model folder: `python -m minips.convert FILE.gguf OUTDIR`.

Exit status: 0 done, 1 refused or failed (one line on stderr), 2 bad usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .command import command
from .gguf_convert import convert_gguf


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minips.convert", description="Convert a GGUF model to a Hugging Face folder (bf16).")
    parser.add_argument("file", metavar="FILE.gguf", help="model of the llama, qwen2 or qwen3 architecture")
    parser.add_argument("outdir", metavar="OUTDIR", help="folder to make; must not exist, or be empty")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def run(args: argparse.Namespace) -> int:
    print(convert_gguf(args.file, args.outdir, progress=None if args.quiet or not sys.stderr.isatty() else _show))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused or failed (one line), 2 bad usage, 130 Ctrl-C. argv None: the process ends with this call."""
    return command(argv, lambda: run(build_parser().parse_args(argv)))


def _show(done: int, total: int) -> None:
    print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
