"""The tokenizer and the bundle of the server's tests."""

from __future__ import annotations

from tests.server.conftest import bundle, raw_tokenizer

__all__ = ["bundle", "raw_tokenizer"]
