"""Convert a GGUF file into a model folder: `python -m minips.convert FILE.gguf OUTDIR`.

Exit status: 0 done, 1 refused or failed (one line on stderr), 2 bad usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys

from .errors import MinipsError
from .gguf_convert import convert_gguf


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m minips.convert", description="Convert a GGUF model to a Hugging Face folder (bf16).")
    parser.add_argument("file", metavar="FILE.gguf", help="model of the llama, qwen2 or qwen3 architecture")
    parser.add_argument("outdir", metavar="OUTDIR", help="folder to make; must not exist, or be empty")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    arguments = parser.parse_args(argv)
    show = None if arguments.quiet or not sys.stderr.isatty() else _show
    try:
        folder = convert_gguf(arguments.file, arguments.outdir, progress=show)
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminips: interrupted", file=sys.stderr)
        return 130
    print(folder)
    return 0


def _show(done: int, total: int) -> None:
    print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
