"""The options that both fake engines have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


def options(version: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="with tokenizer.json, as tests.tiny_model writes it")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--version", default=version)
    parser.add_argument("--events", default="")
    parser.add_argument("--replay")
    parser.add_argument("--layout", choices=("maps", "arrays"), default="maps", help="SGLang's arrays carry no salt")
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--token-s", type=float, default=0.001)
    parser.add_argument("--stream-interval", type=int, default=1)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options with the folder's tokenizer."""
    args = parser.parse_args(argv)
    args.tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    return args
