"""Each kind of volatile text is found in the system prompt of each API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from server.config import GatewayConfig
from server.models.served_model import ServedModel, build_model
from tests.server.api.test_prompts import LONG, WITH_TOOLS, chat, completion, messages, parting_of, responses
from tests.server.conftest import bundle_of

VOLATILE: Final = {
    "a date": ("Today is 2026-11-24, a day.", "Today is 2026-11-25, a day."),
    "a time": ("It is 13:59:08 now.", "It is 13:59:41 now."),
    "an id": ("Session 0f8fad5b-d9cb-469f-a165-70867728950e.", "Session 7c9e6679-7425-40de-944b-e07fc1f90ae7."),
    "a path": ("In /home/ann/project.", "In /home/bob/project."),
    "a number": ("You have 9 files.", "You have 12 files."),
    "white space": ("Do  this.", "Do this."),
    "other text": ("Ask Ann first.", "Ask Bob first."),
}
PLACES: Final[dict[str, tuple[Callable[[str], dict[str, Any]], str]]] = {
    "chat": (chat, "messages[0].content"),
    "responses": (responses, "instructions"),
    "messages": (messages, "system[1].text"),
    "completions": (completion, "prompt"),
}


@pytest.fixture(scope="module")
def model(raw_tokenizer: Tokenizer) -> Iterator[ServedModel]:
    bundle = bundle_of(raw_tokenizer, chat_template=WITH_TOOLS)
    with ThreadPoolExecutor(1) as executor:
        yield build_model(bundle, executor, GatewayConfig(workers=("http://127.0.0.1:9",)))


@pytest.mark.parametrize("api", PLACES)
@pytest.mark.parametrize("kind", VOLATILE)
def test_each_kind_is_found_in_each_api(model: ServedModel, kind: str, api: str) -> None:
    make, field = PLACES[api]
    texts = [f"{LONG}{text}\n{LONG}" for text in VOLATILE[kind]]
    parting = parting_of(model, *map(make, texts))
    at = next(place for place, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
    assert (parting.field, parting.character, parting.volatile) == (field, at, kind)
