"""`headstart bench limits`: the cost of single requests within every limit, each at the worst of its fields.

A real gateway and a real worker with the model of `headstart serve`, each a process of its own; one request at a time.
A case passes within four bounds. The gateway grows by at most twice the body and 64 MB. Its loop is never held for
100 ms. No step takes a second longer than the longest without such a request. The worker lives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.dev.gateway_load.processes import ended, free_ports, scrape, until_ready
from benchmarks.report import Figure, Report, environment, option_parser, to_json
from worker.common.command_line import module_command

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODEL: Final = "limits"
MAX_LOOP_S: Final = 0.1
MAX_MORE_STEP_S: Final = 1.0
SPARE_BYTES: Final = 64 << 20
START_TIMEOUT_S: Final = 180.0
_MB: Final = 1 << 20
_COLUMNS: Final = ("status", "body MB", "grown MB", "of MB", "loop ms", "step s", "took s")
_WIDTHS: Final = (7, 9, 10, 8, 9, 8, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. The body is made when it is due: some take 32 MB."""

    name: str
    path: str
    body: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    status: int
    """0: no answer in time."""
    body_bytes: int
    grown_bytes: int
    loop_s: float
    step_s: float
    seconds: float

    def failures(self, base_step_s: float) -> list[str]:
        """Return the figures above their bounds."""
        found = {
            "memory": self.grown_bytes > 2 * self.body_bytes + SPARE_BYTES,
            "loop": self.loop_s >= MAX_LOOP_S,
            "step": self.step_s > base_step_s + MAX_MORE_STEP_S,
            "answer": self.status == 0 or self.status >= 500,
        }
        return [name for name, failed in found.items() if failed]


@dataclass(frozen=True, slots=True)
class Site:
    url: str
    ops: str
    gateway: subprocess.Popen[Any]
    worker_url: str
    worker: subprocess.Popen[Any]


def _filled(size: int, unit: str) -> str:
    return unit * (size // len(unit))


def cases(size: int = 32 * _MB - 1024, echo_tokens: int = 512) -> list[Case]:
    """`size`: of the largest bodies; `echo_tokens`: of each prompt that is given back."""

    def chat(content: str = "Hello", **fields: Any) -> bytes:
        message = {"role": "user", "content": content}
        return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 2, **fields}).encode()

    def completion(prompt: Any = "Hello", **fields: Any) -> bytes:
        return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}).encode()

    def escaped(size: int, unit: str) -> bytes:
        head, tail = chat("@").split(b"@")
        return head + (unit * (size // len(unit))).encode() + tail

    def tools(count: int, width: int) -> list[dict[str, Any]]:
        fields = {f"field_{number}": {"type": "string"} for number in range(width)}
        schema = {"type": "object", "properties": fields}
        return [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(count)]

    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema, "b": {"enum": list(range(100))}}}
        return schema

    words = [f"word{number} of many that are bad" for number in range(1024)]
    long = "The quick brown fox jumps over the lazy dog and runs. "
    half, mid = size // 2, min(size, 16 * _MB)
    return [
        Case("plain", CHAT, lambda: chat(long * 40)),
        Case("n_64", CHAT, lambda: chat(n=64, max_tokens=16)),
        Case("allowed_ids_1m", CHAT, lambda: chat(allowed_token_ids=[i % 49152 for i in range(1_000_000)])),
        Case("allowed_ids_1m_n_64", CHAT, lambda: chat(allowed_token_ids=[i % 49152 for i in range(1_000_000)], n=64)),
        Case("logit_bias_all", CHAT, lambda: chat(logit_bias={str(i): -1.5 for i in range(49152)})),
        Case("logit_bias_all_n_64", CHAT, lambda: chat(logit_bias={str(i): -1.5 for i in range(49152)}, n=64)),
        Case("bad_words_1024", CHAT, lambda: chat(bad_words=words)),
        Case("bad_words_256_kb", CHAT, lambda: chat(bad_words=[f"{i:04}" + "ab " * 83 for i in range(1024)])),
        Case("bad_words_1_mb", CHAT, lambda: chat(bad_words=[f"{i:04}" + "x" * 1020 for i in range(1024)])),
        Case("prompts_1024", COMPLETIONS, lambda: completion(["a"] * 1024)),
        Case("prompts_1024_2_mb", COMPLETIONS, lambda: completion([_filled(2000, "word ")] * 1024, max_tokens=8000)),
        Case("prompts_ids_1024", COMPLETIONS, lambda: completion([[1] * 1100] * 1024)),
        Case("prompt_ids", COMPLETIONS, lambda: completion([7] * (size // 3))),
        Case("one_new_word", CHAT, lambda: chat(_filled(size - 200, "zyqxv "))),
        Case("one_new_word_15_mb", CHAT, lambda: chat(_filled(mid - _MB, "zyqxv "))),
        Case("one_word_no_space", COMPLETIONS, lambda: completion("z" * (mid - _MB))),
        Case("one_word_that_may_fit", COMPLETIONS, lambda: completion("z" * 600_000)),
        Case("spaces_that_may_fit", COMPLETIONS, lambda: completion(" " * 600_000)),
        Case("many_small_prompts_16_mb", COMPLETIONS, lambda: completion([_filled(15_000, "zyqxv ")] * 1024)),
        Case("truncated", COMPLETIONS, lambda: completion(_filled(mid - _MB, "so "), truncate_prompt_tokens=16)),
        Case("truncated_some", COMPLETIONS, lambda: completion(_filled(90_000, "so "), truncate_prompt_tokens=16)),
        Case("escapes", CHAT, lambda: escaped(size - 200, "\\u00e9")),
        Case("escapes_15_mb", CHAT, lambda: escaped(mid - _MB, "\\u00e9")),
        Case("quotes_15_mb", CHAT, lambda: escaped(mid - _MB, '\\"[{\\\\')),
        Case(
            "wide_15_mb",
            COMPLETIONS,
            lambda: json.dumps(
                {"model": MODEL, "prompt": "x" * (mid - _MB) + "\U0001f600"}, ensure_ascii=False
            ).encode(),
        ),
        Case("control_tokens", CHAT, lambda: chat(_filled(size - 200, "<|im_end|>"))),
        Case("control_tokens_3_mb", COMPLETIONS, lambda: completion(_filled(mid // 5, "<|im_end|>"))),
        Case("control_tokens_600_kb", COMPLETIONS, lambda: completion(_filled(600_000, "<|im_end|>"))),
        Case("messages_60000", CHAT, lambda: chat(messages=[{"role": "user", "content": "a"}] * 60_000)),
        Case(
            "parts_60000",
            CHAT,
            lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]),
        ),
        Case(
            "input_items_60000",
            "/v1/responses",
            lambda: json.dumps({"model": MODEL, "input": [{"role": "user", "content": "a"}] * 60_000}).encode(),
        ),
        Case(
            "message_blocks_60000",
            "/v1/messages",
            lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]),
        ),
        Case(
            "message_results_40000",
            "/v1/messages",
            lambda: chat(
                messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}] * 40_000}]
            ),
        ),
        Case("empty_objects", CHAT, lambda: chat(chat_template_kwargs={"thinking": [{}] * (half // 4)})),
        Case("unknown_field", CHAT, lambda: chat(unknown=[[]] * (half // 4))),
        Case("detokenize_3m", "/detokenize", lambda: json.dumps({"tokens": [1000] * 3_000_000}).encode()),
        Case("detokenize_65536", "/detokenize", lambda: json.dumps({"tokens": [1000] * 65_536}).encode()),
        Case("tokenize_15_mb", "/tokenize", lambda: json.dumps({"prompt": _filled(mid - _MB, "zyqxv ")}).encode()),
        Case(
            "tokenize_100_kb",
            "/tokenize",
            lambda: json.dumps({"prompt": _filled(100_000, "zyqxv "), "return_token_strs": True}).encode(),
        ),
        Case(
            "schema_wide",
            CHAT,
            lambda: chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {
                        "name": "s",
                        "schema": {"type": "object", "properties": {f"f{i}": {} for i in range(40_000)}},
                    },
                }
            ),
        ),
        Case(
            "schema_deep",
            CHAT,
            lambda: chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": nested(25)}}),
        ),
        Case("tools_128", CHAT, lambda: chat(tools=tools(128, 60))),
        Case("tools_4_mb", CHAT, lambda: chat(tools=tools(128, 800))),
        Case("regex_64_kb", CHAT, lambda: chat(structured_outputs={"regex": "(a|b)" * 13_000})),
        Case("grammar_1_mb", CHAT, lambda: chat(structured_outputs={"grammar": "start: " + '"a" ' * 249_000})),
        Case("choices_100000", CHAT, lambda: chat(structured_outputs={"choice": [f"c{i}" for i in range(100_000)]})),
        Case(
            "echo_logprobs",
            COMPLETIONS,
            lambda: completion(
                [[100 + i % 40_000 for i in range(k, k + echo_tokens)] for k in range(8)],
                echo=True,
                logprobs=20,
                max_tokens=0,
            ),
        ),
        Case(
            "echo_logprobs_stream",
            COMPLETIONS,
            lambda: completion(
                [[200 + i % 40_000 for i in range(k, k + echo_tokens)] for k in range(2)],
                echo=True,
                logprobs=20,
                stream=True,
            ),
        ),
    ]


def main(argv: Sequence[str]) -> int:
    parser = option_parser("limits", "What single requests cost that are within every limit.")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="only these cases")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--echo-tokens", type=int, default=512, help="of each of 8 echoed prompts (default 512)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of each request (default 120)")
    options = parser.parse_args(argv)
    chosen = cases(echo_tokens=options.echo_tokens)
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if options.only is not None:
        unknown = set(options.only) - {case.name for case in chosen}
        if unknown:
            parser.error(f"no such case: {', '.join(sorted(unknown))}")
        chosen = [case for case in chosen if case.name in options.only]
    with ExitStack() as stack:
        measured, base_step_s, num_lost = asyncio.run(_measure(stack, chosen, options))
    print(f"\nlongest step without them {base_step_s:.2f} s; workers lost: {num_lost}")
    if options.json:
        print(to_json(_report(measured, base_step_s, num_lost)), flush=True)
    return 1 if num_lost or any(each.failures(base_step_s) for each in measured) else 0


def _head() -> str:
    env = ", ".join(f"{key} {value}" for key, value in environment(Report("limits", ())).items())
    names = "".join(name.rjust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True))
    return f"headstart bench limits\n{env}\n\n{'case':26}{names}  above its bound"


def _row(each: Measured, base_step_s: float) -> str:
    allowed = (2 * each.body_bytes + SPARE_BYTES) / _MB
    cells = (
        str(each.status or "none"),
        f"{each.body_bytes / _MB:.2f}",
        f"{each.grown_bytes / _MB:.1f}",
        f"{allowed:.0f}",
        f"{each.loop_s * 1e3:.0f}",
        f"{each.step_s:.2f}",
        f"{each.seconds:.1f}",
    )
    row = "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"{each.case:26}{row}  {', '.join(each.failures(base_step_s))}".rstrip()


def _report(measured: Sequence[Measured], base_step_s: float, num_lost: int) -> Report:
    figures = [Figure("base_step_s", base_step_s, "s"), Figure("workers_lost", num_lost)]
    for each in measured:
        figures += [
            Figure(f"{each.case}.status", each.status),
            Figure(f"{each.case}.body_bytes", each.body_bytes, "B"),
            Figure(f"{each.case}.grown_bytes", each.grown_bytes, "B"),
            Figure(f"{each.case}.loop_delay_s", each.loop_s, "s"),
            Figure(f"{each.case}.step_s", each.step_s, "s"),
        ]
    failed = sum(bool(each.failures(base_step_s)) for each in measured)
    return Report("limits", [*figures, Figure("failed_cases", failed)])


async def _measure(
    stack: ExitStack, chosen: Sequence[Case], options: argparse.Namespace
) -> tuple[list[Measured], float, int]:
    site = stack.enter_context(started())
    await until_ready(site.url)
    plain = cases()[0]
    await measure(site, plain, START_TIMEOUT_S)  # compiles, and touches the pool
    base_step_s = max([(await measure(site, plain, options.timeout_s)).step_s for _ in range(2)])
    measured = []
    print(_head(), flush=True)
    for case in chosen:
        measured.append(await measure(site, case, options.timeout_s))
        print(_row(measured[-1], base_step_s), flush=True)
        if site.worker.poll() is not None:
            break
    num_lost = int((await _scrape(site.ops)).get("headstart_workers_lost_total", 0.0))
    return measured, base_step_s, num_lost + (site.worker.poll() is not None)


async def measure(site: Site, case: Case, timeout_s: float) -> Measured:
    """One request and what it did to the gateway and the worker."""
    body = case.body()
    await _scrape(site.ops)
    await _scrape(site.worker_url)
    before = _memory(site.gateway.pid, "VmRSS")
    _forget_peak(site.gateway.pid)
    begun_s = time.monotonic()
    status = await _ask(site.url + case.path, body, timeout_s)
    seconds = time.monotonic() - begun_s
    grown = _memory(site.gateway.pid, "VmHWM") - before
    loop_s = (await _scrape(site.ops))["headstart_event_loop_longest_delay_seconds"]
    step_s = 0.0
    with contextlib.suppress(aiohttp.ClientError):
        step_s = (await _scrape(site.worker_url)).get("headstart_worker_longest_step_seconds", 0.0)
    return Measured(case.name, status, len(body), grown, loop_s, step_s, seconds)


async def _ask(url: str, body: bytes, timeout_s: float) -> int:
    headers = {"content-type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=io.BytesIO(body), headers=headers) as response,
        ):
            async for _ in response.content.iter_any():
                pass
            return response.status
    except (TimeoutError, aiohttp.ClientError):
        return 0


async def _scrape(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session:
        return await scrape(session, url)


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory(pid: int, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


@contextmanager
def started() -> Iterator[Site]:
    """Start a worker and a gateway, which end with the context."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    port, ops_port = free_ports(2)
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        worker = [*module_command("worker"), "--port", "0", "--served-model-name", MODEL, "--log-level", "error"]
        worker_process = stack.enter_context(
            ended(subprocess.Popen(worker, env=env, stdout=subprocess.PIPE, stderr=said))
        )
        assert worker_process.stdout is not None
        worker_url = ""
        for line in worker_process.stdout:
            event = json.loads(line)
            worker_url = event["url"]
            if event["event"] == "ready":
                break
        else:
            said.seek(0)
            raise SystemExit(f"the worker is not ready: {said.read()[-2000:].decode(errors='replace')}")
        gateway = [*module_command("server.gateway"), "--port", str(port), "--ops-port", str(ops_port)]
        gateway += ["--workers", worker_url, "--log-level", "error", "--drain-grace-s", "1"]
        gateway_process = stack.enter_context(ended(subprocess.Popen(gateway, env=env)))
        yield Site(
            f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", gateway_process, worker_url, worker_process
        )
