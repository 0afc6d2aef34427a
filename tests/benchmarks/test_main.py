"""`headstart bench` and its end."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks


def test_ctrl_c_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "benchmarks.cache", SimpleNamespace(main=interrupted))
    monkeypatch.setattr(sys, "argv", ["bench", "cache"])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(str(Path(benchmarks.__file__).with_name("__main__.py")), run_name="__main__")
