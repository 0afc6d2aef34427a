from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.server.api.engine_worker import EngineWorker
from worker.wire import TokenizerBundle


@pytest.fixture
def engines(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> list[EngineWorker]:
    return [EngineWorker(bundle, f"w{number}", tokenizer=raw_tokenizer) for number in range(2)]
