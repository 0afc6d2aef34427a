"""Two tenants of one fleet of real processes: neither sees the other's cache, and no third party sees their text."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.hashing import Namespace, hash_chain, index_entry
from cache.redis_index.schema import Keys, decode_state
from server.auth.identity import tenant_salt
from tests.e2e.secure_fleet import WORKER_NAME, SecureFleet
from tests.redis_server import RedisServer
from tests.waiting import HANG_S, wait_until
from worker.wire import TokenizerBundle, unpack

SECRET_WORDS = ("zanzibarquokka", "moonlitferrule", "obsidiantrellis")
PROMPT = " ".join(f"The {word} of page {n} is {n * n}." for n in range(12) for word in SECRET_WORDS)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[SecureFleet]:
    with SecureFleet(tmp_path_factory.mktemp("fleet"), tiny_model, "one", "two", "three") as fleet:
        yield fleet


def completion(prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_ids(fleet: SecureFleet, prompt: str = PROMPT) -> list[int]:
    answer = fleet.post("one", {"model": "tiny", "prompt": prompt}, "/tokenize")
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids


def entries(fleet: SecureFleet, salt: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Return what Redis would hold for these tokens under a salt."""
    b = unpack(fleet.ask_worker(fleet.workers[0], "/bundle"), TokenizerBundle)
    root = Namespace(b.model, b.revision, b.fingerprint, b.block_size).root(salt=salt)
    return [bytes(index_entry(link)) for link in hash_chain(root, token_ids, b.block_size)]


class Redis:
    """A client on the server's unix socket: all that a thief of Redis' password could do."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(HANG_S)
        self._socket.connect(str(server.socket))
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def __call__(self, *words: str | bytes) -> Any:
        parts = [word if isinstance(word, bytes) else word.encode() for word in words]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts))
        return self._reply()

    def _reply(self) -> Any:
        line = self._file.readline().rstrip()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"*":
                return [self._reply() for _ in range(int(rest))]
            case b"$":
                return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
            case b":":
                return int(rest)
            case b"+":
                return rest
        raise AssertionError(line)

    def dump(self) -> dict[bytes, bytes]:
        """Every key with all of its value in one piece."""
        read = {
            b"string": lambda key: [self("GET", key)],
            b"hash": lambda key: self("HGETALL", key),
            b"set": lambda key: self("SMEMBERS", key),
        }
        kinds = {key: self("TYPE", key) for key in self("KEYS", "*")}
        # A lease may end between the questions.
        values = {key: read[kind](key) for key, kind in kinds.items() if kind != b"none"}
        return {key: b"\0".join(value) for key, value in values.items() if value != [None]}


def block_sets(redis: Redis) -> list[bytes]:
    """The key of every worker's set: Redis has no key for the set of a worker that holds nothing."""
    keys = Keys("headstart", 0)
    fields = redis("HGETALL", keys.states)
    states = {worker_id.decode(): decode_state(data) for worker_id, data in zip(fields[::2], fields[1::2], strict=True)}
    return [keys.blocks(worker_id, state.epoch, state.generation) for worker_id, state in states.items()]


def test_a_tenant_finds_only_its_own_prompts(fleet: SecureFleet) -> None:
    assert cached_tokens(fleet.post("one", completion())) == 0
    assert cached_tokens(fleet.post("one", completion())) > 0.9 * len(prompt_ids(fleet)) - 16
    assert cached_tokens(fleet.post("two", completion())) == 0
    assert cached_tokens(fleet.post("two", completion())) > 0
    for salt in ("one", "default", tenant_salt(fleet.secret, "one").hex(), "a" * 64):
        assert cached_tokens(fleet.post("three", completion(cache_salt=salt))) == 0, salt
    assert cached_tokens(fleet.post("three", completion(prompt_cache_key="one"))) == 0


def test_neither_salt_nor_key_of_a_request_opens_another_cache(fleet: SecureFleet) -> None:
    prompt = PROMPT[::-1]
    first = completion(prompt, cache_salt="shared", prompt_cache_key="shared")
    assert cached_tokens(fleet.post("one", first)) == 0
    for fields in (
        {"cache_salt": "shared", "prompt_cache_key": "shared"},
        {"cache_salt": "one"},
        {"cache_salt": tenant_salt(fleet.secret, "one").hex()},
        {"prompt_cache_key": "shared"},
    ):
        assert cached_tokens(fleet.post("two", completion(prompt, **fields))) == 0, fields
    assert cached_tokens(fleet.post("one", first)) > 0, "its own repeat does"
    assert cached_tokens(fleet.post("one", completion(prompt))) == 0, "a salt narrows"


def test_forged_entries_cost_speed_only(fleet: SecureFleet) -> None:
    """The strongest forgery there is: entries for the victim's exact chain, which takes the cluster secret to make."""
    prompt = PROMPT.replace("page", "sheet")
    expected = fleet.post("one", completion(prompt)).json()["choices"][0]["text"]
    ids = prompt_ids(fleet, prompt)
    forged = [*entries(fleet, tenant_salt(fleet.secret, "two"), ids), *entries(fleet, b"", ids)]
    with Redis(fleet.redis) as redis:
        sets = block_sets(redis)
        assert len(sets) == len(fleet.workers)
        held = set().union(*(redis("SMEMBERS", key) for key in sets))
        for key in sets:
            redis("SADD", key, *forged, *held)
        answer = fleet.post("two", completion(prompt))
    assert cached_tokens(answer) == 0
    assert answer.json()["choices"][0]["text"] == expected


def test_nothing_that_tells_of_a_prompt_is_in_redis_logs_or_metrics(fleet: SecureFleet) -> None:
    for tenant in ("one", "two"):
        assert fleet.post(tenant, completion()).status_code == 200
    for broken in (completion(max_tokens=-1), completion(temperature=PROMPT), completion(model=SECRET_WORDS[0])):
        assert fleet.post("one", broken).status_code in (400, 404)
    ids = prompt_ids(fleet)
    with Redis(fleet.redis) as redis:
        places = {f"Redis {key!r}": key + b"\0" + value for key, value in redis.dump().items()}
    stored = b"".join(places.values())
    keyed = entries(fleet, tenant_salt(fleet.secret, "one"), ids)
    assert all(entry in stored for entry in keyed[:-1]), "the scan sees what is there"
    for part in fleet.parts:
        places[f"log of {part.name}"] = part.log.read_bytes()
    assert b'"route": "completions"' in places["log of g0"], "the access log is among them"
    for path in ("/metrics", "/workers", "/prefixes"):
        places[f"gateway's {path}"] = httpx.get(f"{fleet.ops_url}{path}", verify=fleet.trust, timeout=HANG_S).content
    for worker in fleet.workers:
        places[f"metrics of {worker.name}"] = fleet.ask_worker(worker, "/metrics")
        places[f"debug state of {worker.name}"] = fleet.ask_worker(worker, "/debug/state")

    needles: dict[str, bytes] = {f"the word {word}": word.encode() for word in SECRET_WORDS}
    needles |= {f"a key of {tenant}": key.encode() for tenant, key in fleet.keys.items()}
    needles["the cluster secret"] = fleet.secret
    for start in range(0, len(ids) - 4, 4):
        some = ids[start : start + 4]
        for separator in (", ", ",", " "):
            needles[f"tokens from {start} by {separator!r}"] = separator.join(map(str, some)).encode()
        needles[f"tokens from {start} as u32"] = b"".join(id_.to_bytes(4, "little") for id_ in some)
        needles[f"tokens from {start} as u16"] = b"".join(id_.to_bytes(2, "little") for id_ in some)
    for salt in (b"", b"one", b"default", tenant_salt(b"", "one"), tenant_salt(b"", "default")):
        for number, entry in enumerate(entries(fleet, salt, ids)):
            needles[f"unkeyed hash {number} under {salt!r}"] = entry
            needles[f"unkeyed hash {number} under {salt!r} in hex"] = entry.hex().encode()
    found = [(what, where) for where, data in places.items() for what, needle in needles.items() if needle in data]
    assert found == []


def test_every_connection_is_encrypted(fleet: SecureFleet) -> None:
    """A plain request gets no answer on any port, and another authority's client none either."""
    ports = [fleet.gateway.port, fleet.gateway.ops_port, *(worker.port for worker in fleet.workers)]
    for port in ports:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=HANG_S)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://127.0.0.1:{port}/health/live", verify=ssl.create_default_context(), timeout=HANG_S)
    urls = [
        worker["url"]
        for worker in httpx.get(f"{fleet.ops_url}/workers", verify=fleet.trust, timeout=HANG_S).json()["workers"]
    ]
    assert len(urls) == 2
    assert all(url.startswith("https://127.0.0.1:") for url in urls)


def test_certificates_are_replaced_under_a_running_fleet(fleet: SecureFleet) -> None:
    def serial(port: int, name: str) -> object:
        with (
            socket.create_connection(("127.0.0.1", port), HANG_S) as plain,
            fleet.trust.wrap_socket(plain, server_hostname=name) as wrapped,
        ):
            return (wrapped.getpeercert() or {})["serialNumber"]

    shown = [(fleet.gateway.port, "127.0.0.1"), *((worker.port, WORKER_NAME) for worker in fleet.workers)]
    before = [serial(*where) for where in shown]
    fleet.authority.issue("gateway", "127.0.0.1")
    fleet.authority.issue("worker", WORKER_NAME)
    wait_until(lambda: all(serial(*where) != old for where, old in zip(shown, before, strict=True)))
    assert fleet.post("one", completion()).status_code == 200
