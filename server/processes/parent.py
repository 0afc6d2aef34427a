"""The parent of `headstart gateway --processes N`: holds the sockets, starts the processes, owns the ops port."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop

from server.auth.limit_table import LimitTable, create_shared
from server.cli.serve.child import Child, ChildRefusedError, ChildSpec
from server.config import GatewayConfig
from server.gateway import Gateway
from server.http.front import address_of, listen, listen_together
from server.processes.front import ProcessesFront
from server.processes.members import Member, Members

log = logging.getLogger(__name__)

STOP_MARGIN_S: Final = 5.0
"""On top of the grace for open requests, before a process is killed."""


def run(config: GatewayConfig, argv: Sequence[str]) -> None:
    """Serve until drained. Raises OSError, and ChildRefusedError when a process cannot work as asked."""
    with ExitStack() as stack:
        publics = listen_together(config.host, config.port, config.processes)
        for listener in publics:
            stack.enter_context(listener)
        ops = stack.enter_context(listen(config.ops_host, config.ops_port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-gateway-")))
        limits = folder / "limits"
        create_shared(limits)
        children, members = [], []
        for number, public in enumerate(publics):
            path = folder / f"ops-{number}.sock"
            child_ops = stack.enter_context(_unix_listener(path))
            command = [str(number), str(public.fileno()), str(child_ops.fileno()), str(limits), *argv]
            spec = ChildSpec(
                name=f"process-{number}",
                command=[sys.executable, "-m", "server.processes.process", *command],
                on_line=_relay(config, number),
                pass_fds=(public.fileno(), child_ops.fileno()),
            )
            child = Child(spec, log.warning)
            children.append(child)
            members.append(Member(path, child))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            table = LimitTable.shared(limits, config.processes)
            try:
                runner.run(_serve(config, table, children, Members(members), address_of(publics[0]), ops))
            except* ChildRefusedError as refused:
                raise refused.exceptions[0] from None


async def _serve(
    config: GatewayConfig,
    limits: LimitTable,
    children: Sequence[Child],
    members: Members,
    address: str,
    ops: socket.socket,
) -> None:
    front = ProcessesFront(children, address, config.drain_grace_s + STOP_MARGIN_S)
    await Gateway(config, limits, members).run(front, ops)


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def _relay(config: GatewayConfig, number: int) -> Callable[[str], None]:
    """A process's lines go where the parent's go; a line that a program reads stays as it is."""
    prefix = "" if config.log_format == "json" else f"[process-{number}] "

    def pass_on(line: str) -> None:
        print(f"{prefix}{line}", file=sys.stderr, flush=True)

    return pass_on
