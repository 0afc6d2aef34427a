"""Tenants through the real proxy of LiteLLM, with the files that docs/tenants_of_a_front.md shows."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from server.auth.identity import digest_text
from tests.clients.running import LITELLM, ROOT
from tests.e2e.serving import SMALL_POOL, Serve, free_ports
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S, wait_until

KEY: Final = "hs-key-of-the-front-for-tests"
PAGE: Final = ROOT / "docs/tenants_of_a_front.md"
TEAMS: Final = [f"team-{number:02}" for number in range(20)]
LIMITED: Final = TEAMS[-1]
SYSTEM: Final = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 30}
AUTH: Final = """
from litellm.proxy._types import UserAPIKeyAuth

async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, team_id=api_key.removeprefix("sk-"))
"""
"""Instead of a database of keys: the key names the team."""


@dataclass(frozen=True)
class Fleet:
    """A proxy of LiteLLM in front of a running Headstart."""

    url: str
    usage_log: Path

    def ask(self, team: str, **fields: Any) -> httpx.Response:
        """Ask as a client that names another tenant wherever it can."""
        forged = {"X-Headstart-Tenant": "team-forged"}
        body = {"model": "smollm2", "messages": [SYSTEM, {"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
        body["extra_headers"] = forged
        sent = {"authorization": f"Bearer sk-{team}", **forged}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=sent, timeout=HANG_S)

    def cached(self, team: str) -> int:
        answer = self.ask(team)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def use(self) -> Counter[str]:
        """Return the answered requests of each tenant."""
        lines = [json.loads(line) for line in self.usage_log.read_text().splitlines()]
        assert {line["key"] for line in lines} <= {"litellm"}
        return Counter(line["tenant"] for line in lines if line["status"] == 200)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("litellm")
    keys, usage_log = folder / "keys.toml", folder / "usage.jsonl"
    front = f'[[keys]]\ndigest = "{digest_text(KEY.encode())}"\ntenant = "gateway"\nname = "litellm"'
    tables = [f'[[tenants]]\ntenant = "{LIMITED}"\nrequests_per_minute = 3\n']
    keys.write_text("\n".join([front, "trusted_front = true\n", *tables]))
    model = write_tiny_model(folder / "smollm2")
    gateway_args = f"--gateway-args=--api-keys {keys} --usage-log {usage_log}"
    with Serve("--model", str(model), "--num-workers", "1", f"--worker-args={SMALL_POOL}", gateway_args) as serve:
        [port] = free_ports(1)
        _write_config(folder, serve)
        log = (folder / "proxy.log").open("w")
        command = [str(LITELLM / "bin/litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
        env = {**os.environ, "HEADSTART_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
        env["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(32)}"
        proxy = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: _is_ready(port, proxy, folder), what="LiteLLM", timeout_s=2 * HANG_S)
            yield Fleet(f"http://127.0.0.1:{port}", usage_log)
        finally:
            proxy.terminate()
            proxy.wait(HANG_S)
            log.close()


def _write_config(folder: Path, serve: Serve) -> None:
    """Write the page's files, and what a test without a database needs."""
    page = PAGE.read_text()
    [config] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "litellm_settings" in text]
    [hook] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "http://127.0.0.1:8000" in config
    config = config.replace("http://127.0.0.1:8000", serve.url)
    general = (
        "general_settings:\n  custom_auth: team_auth.user_api_key_auth\n  forward_client_headers_to_llm_api: true\n"
    )
    (folder / "config.yaml").write_text(config + general)
    (folder / "headstart_tenant.py").write_text(hook)
    (folder / "team_auth.py").write_text(AUTH)


def _is_ready(port: int, proxy: subprocess.Popen[bytes], folder: Path) -> bool:
    assert proxy.poll() is None, (folder / "proxy.log").read_text()[-4000:]
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).status_code == 200
    return False


def test_20_teams_have_their_own_caches_limits_and_use(fleet: Fleet) -> None:
    assert [fleet.cached(team) for team in TEAMS] == [0] * len(TEAMS), "no team finds another's prefix"
    again = {fleet.cached(team) for team in TEAMS}
    assert len(again) == 1
    assert again.pop() > 100
    wait_until(lambda: fleet.use() == dict.fromkeys(TEAMS, 2), what="the use of each team")
    # A slow machine may have given some of the three requests a minute back.
    assert 429 in [fleet.ask(LIMITED, num_retries=0).status_code for _ in range(4)]
    assert fleet.cached(TEAMS[0]) > 100, "the limit is one team's"
