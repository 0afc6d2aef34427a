"""An adapter that joins a fleet of other engines: its engine has its peers' prompts before the registry names it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from server.auth.identity import digest_text
from tests.e2e.engine_fleet import EngineFleet, FakeEngine
from tests.e2e.test_other_engines import ask, bearer, completion, new_prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e
KEYS = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in ("first", "second", "third")}


def add(fleet: EngineFleet, kind: str, name: str, model: Path) -> FakeEngine:
    return (fleet.add_engine if kind == "vllm" else fleet.add_sglang)(name, model, "--lora", "pirate")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_it_joins_with_the_prompts_of_its_peer(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "\n".join(
            f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{tenant}"\n' for tenant, key in KEYS.items()
        )
    )
    fleet = EngineFleet(tmp_path / "engines", "--api-keys", str(keys))
    fleet.headers = bearer(KEYS["first"])
    peer = add(fleet, kind, "peer", tiny_model)
    with fleet:
        shared, adapted = new_prompt(), new_prompt()
        for tenant in ("first", "second"):
            assert ask(fleet, completion(shared), KEYS[tenant]).found == 0
        assert ask(fleet, completion(adapted, model="pirate"), KEYS["first"]).found == 0

        joiner = add(fleet, kind, "joiner", tiny_model)
        joiner.start()
        [adapter] = joiner.adapters
        adapter.start()
        wait_until(lambda: any(each["worker_id"] == adapter.name for each in fleet.gateway.workers()))
        num_blocks = 3 * 320 // (32 if kind == "vllm" else 16)
        assert joiner.num_held() == [num_blocks], "before the registry named it"
        wait_until(lambda: fleet.num_held(adapter) == num_blocks)

        peer.adapters[0].stop()
        fleet.wait_for(1)
        for body, tenant in ((shared, "first"), (shared, "second")):
            answer = ask(fleet, completion(body), KEYS[tenant])
            assert (answer.worker, answer.promised, answer.found) == (adapter.name, 320, 320)
        assert ask(fleet, completion(adapted, model="pirate"), KEYS["first"]).found == 320
        stranger = ask(fleet, completion(shared), KEYS["third"])
        assert (stranger.promised, stranger.found) == (0, 0), "every prompt has the salt of its tenant"
