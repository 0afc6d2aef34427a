"""What `python -m worker.doctor` says: it loads torch, so it is a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from server.cli.doctor.check import Check

TIMEOUT_S: Final = 120.0
MODULE: Final = "worker.doctor"


def installed() -> bool:
    return importlib.util.find_spec("torch") is not None


async def checks(options: Sequence[str]) -> AsyncIterator[Check]:
    """One by one, as it finds them out."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE, *options), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for line in process.stdout:
                yield msgspec.json.decode(line, type=Check)
            said = (await errors).decode(errors="replace").strip()
            if await process.wait():
                yield Check("worker", "fail", _last_line(said) or "it ended without a word", "run `make install` again")
    except TimeoutError:
        mend = f"run `python -m {MODULE}` to see where it hangs; a GPU that does not answer is the usual reason"
        yield Check("worker", "fail", f"no answer within {TIMEOUT_S:g} s", mend)
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""
