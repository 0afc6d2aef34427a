"""Watchdogs, in processes of their own: what hangs ends, and what is slow or was stopped goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.waiting import HANG_S, wait_until

PROGRAM = """
import asyncio, sys, threading, time
from worker.common.watchdog import MAX_MISSED, watched

TICK_S = 0.05

async def hang():
    print("begun", flush=True)
    while True:
        pass

async def hang_with_a_lock():
    print("begun", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

async def be_slow():
    print("begun", flush=True)
    for _ in range(6):
        time.sleep(0.2 * MAX_MISSED * TICK_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

async def wait_for_line():
    print("begun", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

with asyncio.Runner() as runner, watched(runner.get_loop(), "test", tick_s=TICK_S):
    runner.run(globals()[sys.argv[1]]())
print("ended", flush=True)
"""


def begin(what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("what", ["hang", "hang_with_a_lock"])
def test_a_hung_loop_ends_the_process_and_says_where_it_hangs(what: str) -> None:
    process = begin(what)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "headstart test: its event loop has not run for" in said
    assert f"in {what}" in said, "the stack of the loop's thread"


def test_a_slow_loop_goes_on() -> None:
    process = begin("be_slow")
    assert process.communicate(timeout=HANG_S) == ("ended\n", "")
    assert process.returncode == 0


def test_a_process_that_was_stopped_goes_on() -> None:
    """For longer than the bound: its clocks went on, its threads did not."""
    process = begin("wait_for_line")
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T")
    time.sleep(2.0)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: state_of(process.pid) != "T")
    time.sleep(0.2)
    assert process.communicate("\n", timeout=HANG_S) == ("ended\n", "")
    assert process.returncode == 0


ENGINE_THREAD = """
import asyncio, sys, threading
from worker.contracts.mailbox import Mailbox
from worker.engine.watchdog import StepWatchdog, exit_on_hang

async def main():
    mailbox = Mailbox()
    ends = threading.Event()
    def run():
        while not ends.is_set():
            mailbox.run(wait_s=0.01)
    thread = threading.Thread(target=run)
    thread.start()
    watching = asyncio.create_task(exit_on_hang(mailbox, StepWatchdog(), 0.2, tick_s=0.01))
    await asyncio.sleep(1.0)
    assert not watching.done()
    ends.set()
    thread.join()
    await watching

asyncio.run(main())
"""


def test_an_engine_thread_that_takes_no_command_ends_the_process() -> None:
    process = subprocess.run([sys.executable, "-c", ENGINE_THREAD], capture_output=True, text=True, timeout=HANG_S)
    assert (process.returncode, process.stdout) == (1, "")
    assert "the engine thread has not answered" in process.stderr


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
