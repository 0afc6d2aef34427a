"""`headstart bench` and its end."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import pytest


def test_ctrl_c_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "benchmarks.cache", SimpleNamespace(main=interrupted))
    monkeypatch.setattr(sys, "argv", ["bench", "cache"])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("benchmarks", run_name="__main__")
