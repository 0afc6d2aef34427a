"""Scripted workers, as many as a test needs."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.conftest import ANSWER
from tests.server.request.failing_workers import MakeWorker
from tests.server.scripted_worker import ScriptedWorker
from worker.wire import TokenizerBundle


@pytest.fixture
def make(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> MakeWorker:
    ids = raw_tokenizer.encode(ANSWER).ids
    numbers = count()

    def build(**fields: Any) -> ScriptedWorker:
        return ScriptedWorker(bundle, worker_id=f"w{next(numbers)}", reply=ids, **fields)

    return build
