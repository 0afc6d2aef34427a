"""Requests of real agents and frameworks: each is accepted, and their shared prefix stays whole.

The bodies in `tests/data/agents` have the real ones' form; `tests/clients/scrub.py` has replaced their prose.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from tests.clients.scrub import shingles
from tests.json_texts import texts
from tests.server.conftest import bundle_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post

FOLDER: Final = Path(__file__).parent.parent / "data" / "agents"
AGENTS: Final = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.json.gz"))
CLIENT_LINE: Final = "x-anthropic-billing-header: "


def recorded(agent: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(gzip.decompress((FOLDER / f"{agent}.json.gz").read_bytes()))["requests"]
    return requests


@pytest.mark.parametrize("agent", AGENTS)
async def test_replay(agent: str, raw_tokenizer: Tokenizer) -> None:
    """Every request is answered, and prompts part no earlier than where the client's texts do."""
    worker = ScriptedWorker(bundle_of(raw_tokenizer, max_model_len=1 << 18), reply=[50, 51])
    requests = recorded(agent)
    prompts = []
    async with gateway(worker) as running:
        for request in requests:
            status, _, raw = await post(running.url, request["body"], request["path"], **request["headers"])
            assert status == 200, raw
            prompts.append(raw_tokenizer.decode(worker.received[-1].prompt_ids, skip_special_tokens=False))
    compared = 0
    for earlier in range(len(requests)):
        for later in range(earlier + 1, len(requests)):
            if requests[earlier]["kind"] == requests[later]["kind"]:
                compared += requests[earlier]["conversation"] != requests[later]["conversation"]
                bodies = requests[earlier]["body"], requests[later]["body"]
                check_parting((prompts[earlier], prompts[later]), bodies)
    assert compared, "conversations share a kind of request"


def check_parting(prompts: tuple[str, str], bodies: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Assert that two prompts part inside a text in which the bodies differ, or where one body has more."""
    at = common(*prompts)
    places = []
    first, second = dict(leaves(bodies[0])), dict(leaves(bodies[1]))
    for place in first.keys() & second.keys():
        if first[place] != second[place] and not first[place].startswith(CLIENT_LINE):
            shared = common(first[place], second[place])
            places.append((first[place][:shared][-24:], first[place][shared:][:8]))
    inside = any(prompts[0][:at].endswith(before) and prompts[0][at:].startswith(after) for before, after in places)
    longer = first.keys() != second.keys() and all(text in prompts[0] for text, _ in places if text)
    whole = all(len(prompt) - at < len("<|im_end|>") for prompt in prompts)
    assert inside or longer or whole, (prompts[0][max(at - 60, 0) : at + 30], prompts[1][at : at + 30])


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of a body with its place, but for those that only the server's routing reads."""
    if isinstance(value, str):
        yield place, value.strip()
    elif isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name not in ("metadata", "client_metadata", "prompt_cache_key", "id"):
                yield from leaves(part, f"{place}.{name}")


def common(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("agent", AGENTS)
def test_no_words_of_the_originals(agent: str) -> None:
    packed = (FOLDER / f"{agent}.shingles").read_bytes()
    known = {packed[start : start + 5] for start in range(0, len(packed), 5)}
    assert known
    assert not known & shingles(text for request in recorded(agent) for text in texts(request["body"]))
