"""Roots that `debootstrap` made, with what README names and nothing else, and commands that run in them.

Every command has its own mount and process namespace: when it ends, or is killed, its mounts and children are gone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.waiting import wait_until

CHECKOUT: Final = Path(__file__).parents[2]
README: Final = (CHECKOUT / "README.md").read_text()
PACKAGES: Final = tuple(re.findall(r"apt-get install ([\w+. -]+)`", README)[0].split())
"""Packages that README names for a bare Debian."""
HOST_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_CACHE: Final = "/var/cache/pip"
INSTALL_S: Final = 3600.0
"""Bound of a hang of a command that downloads."""
_CONTAINED: Final = (
    *("setpriv", "--pdeathsig=KILL"),  # a test run that is killed takes it along
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"),
)
# The devices of a root are those that debootstrap has made: the host's, with its GPU, are not there.
_ENTER: Final = """
mkdir -p "$ROOT/dev/shm"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
mount --bind "$CACHE" "$ROOT/var/cache/pip"
exec env -i HOME="$HOME" LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin PIP_CONFIG_FILE=/dev/null \
    PIP_CACHE_DIR=/var/cache/pip $VARIABLES chroot --userspec="$AS" "$ROOT" sh -c 'cd "$1" && sh -c "$2"' - "$IN" "$RUN"
"""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    text: str
    took_s: float


@dataclass(frozen=True)
class Running:
    """A command that runs; its lines are in `log`."""

    process: subprocess.Popen[str]
    log: list[str]
    reader: threading.Thread

    def wait_for(self, pattern: str, timeout_s: float = INSTALL_S) -> re.Match[str]:
        """Wait until the output holds this; AssertionError when the command ends before."""

        def look() -> re.Match[str] | None:
            if self.process.poll() is not None:
                self.reader.join()
            text = "".join(self.log)
            found = re.search(pattern, text)
            assert found or self.process.returncode is None, text
            return found

        match = wait_until(look, timeout_s, pattern)
        assert isinstance(match, re.Match)
        return match

    def interrupt(self) -> str:
        """Press Ctrl-C, wait for the end, and return all that was printed."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(timeout=INSTALL_S)
        self.reader.join()
        return "".join(self.log)


@dataclass(frozen=True)
class Checkout:
    """The sources in a folder of a root, which belongs to a user."""

    root: Path
    cache: Path
    folder: str
    user: str

    @property
    def path(self) -> Path:
        """The folder as the host sees it."""
        return self.root / self.folder.removeprefix("/")

    def fill(self) -> None:
        """Copy the files that git tracks, once, and give them to the user."""
        if self.path.exists():
            return
        if self.user != "root":
            run(("chroot", self.root, "useradd", "--create-home", self.user))
        self.path.mkdir(parents=True)
        listed = run(("git", "-C", CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"))
        for name in filter(None, listed.stdout.split("\0")):
            if (source := CHECKOUT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self.path / name)
        owned = "/root" if self.user == "root" else f"/home/{self.user}"
        run(("chroot", self.root, "chown", "--recursive", self.user, owned))

    @contextmanager
    def start(self, command: str, **variables: str) -> Iterator[Running]:
        """Run a command line in the folder, as the user, and kill all of it at the end."""
        owner = self.path.stat()
        for path in (self.cache, *self.cache.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
        variables_of_entry = {
            "ROOT": str(self.root),
            "CACHE": str(self.cache),
            "HOME": "/root" if self.user == "root" else f"/home/{self.user}",
            "AS": self.user,
            "IN": self.folder,
            "RUN": command,
            "VARIABLES": " ".join(f"{name}={value}" for name, value in variables.items()),
        }
        process = subprocess.Popen(
            [*_CONTAINED, "sh", "-ec", _ENTER],
            env={"PATH": os.environ["PATH"], **variables_of_entry},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            log.extend(iter(process.stdout.readline, ""))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield Running(process, log, reader)
        finally:
            process.kill()
            process.wait()
            reader.join()
            assert process.stdout is not None
            process.stdout.close()

    def run(self, command: str, **variables: str) -> Done:
        """Run a command line to its end."""
        begun_s = time.monotonic()
        with self.start(command, **variables) as running:
            code = running.process.wait(timeout=INSTALL_S)
            running.reader.join()
        return Done(code, "".join(running.log), time.monotonic() - begun_s)

    def used_bytes(self) -> int:
        """Return what .venv takes on the disk."""
        return 512 * sum(path.lstat().st_blocks for path in (self.path / ".venv").rglob("*"))


def run(command: tuple[str | Path, ...]) -> subprocess.CompletedProcess[str]:
    """Run a command of the host; AssertionError with all that it printed when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def need_root_and_debootstrap() -> None:
    """Fail, and never skip: these tests run only on request."""
    if os.geteuid() != 0:
        pytest.fail("tests/install makes Debian roots, which only root may: run them as root")
    for program, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("curl", "curl")):
        if shutil.which(program) is None:
            pytest.fail(f"tests/install needs {program}: apt-get install {package}")


def make_root(release: str, folder: Path) -> None:
    """Make a root of a Debian release with `PACKAGES`, which trusts the host's certificates."""
    run(("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", release, folder))
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    if HOST_CERTIFICATES.exists():
        shutil.copyfile(HOST_CERTIFICATES, folder / HOST_CERTIFICATES.relative_to("/"))
    (folder / PIP_CACHE.removeprefix("/")).mkdir(parents=True)
