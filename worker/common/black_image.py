"""The smallest image that engines take, to find out whether they take any."""

from __future__ import annotations

from typing import Final

BLACK_PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"
)
"""In base64: 64 by 64 pixels, as some models take no fewer."""
