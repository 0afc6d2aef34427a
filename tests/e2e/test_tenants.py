"""Two tenants of one fleet of real processes: neither sees the other's cache, and no third party sees their text."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cache.hashing import Namespace, hash_chain, index_entry
from cache.records import WorkerState
from cache.types import BlockHash, ChainLink
from server.auth.identity import tenant_salt
from tests.certificates import Authority
from tests.e2e.secure_fleet import WORKER_NAME, SecureFleet
from tests.faults.part import Worker
from tests.redis_server import RedisServer
from tests.tcp_sockets import check_connections
from tests.waiting import HANG_S, wait_until
from worker.common.proof import gateway_token
from worker.common.tls import ca_files
from worker.contracts.exchange import BlocksWanted
from worker.kv_transfer.peers import PeerClient
from worker.wire import TokenizerBundle, pack, unpack

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


def root_of(fleet: SecureFleet, salt: bytes) -> BlockHash:
    b = unpack(fleet.ask_worker(fleet.workers[0], "/bundle"), TokenizerBundle)
    return Namespace(b.model, b.revision, b.fingerprint, b.block_size).root(salt=salt)


def chain(fleet: SecureFleet, salt: bytes, token_ids: Sequence[int]) -> list[BlockHash]:
    return hash_chain(root_of(fleet, salt), token_ids, 16)


def entries(fleet: SecureFleet, salt: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Return what Redis would hold for these tokens under a salt."""
    return [bytes(index_entry(link)) for link in chain(fleet, salt, token_ids)]


def thief(server: RedisServer) -> Any:
    """Return a client on the server's unix socket: all that a thief of Redis' password could do."""
    return redis.Redis(unix_socket_path=str(server.socket), socket_timeout=HANG_S)


def dump(client: Any) -> dict[bytes, bytes]:
    """Return every key with all of its value in one piece."""
    read = {
        b"string": lambda key: [client.get(key)],
        b"hash": lambda key: [part for pair in client.hgetall(key).items() for part in pair],
        b"set": client.smembers,
    }
    kinds = {key: client.type(key) for key in client.scan_iter()}
    # A lease may end between the questions.
    values = {key: list(read[kind](key)) for key, kind in kinds.items() if kind != b"none"}
    return {key: b"\0".join(value) for key, value in values.items() if value != [None]}


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


def test_prompts_do_not_leak_into_redis_logs_or_metrics(fleet: SecureFleet) -> None:
    for tenant in ("one", "two"):
        assert fleet.post(tenant, completion()).status_code == 200
    for broken in (completion(max_tokens=-1), completion(temperature=PROMPT), completion(model=SECRET_WORDS[0])):
        assert fleet.post("one", broken).status_code in (400, 404)
    ids = prompt_ids(fleet)
    with thief(fleet.redis) as client:
        places = {f"Redis {key!r}": key + b"\0" + value for key, value in dump(client).items()}
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
    on_disk = {f"disk {path}": path.read_bytes() for path in fleet.folder.glob("kv/*/*.blocks")}
    assert chain(fleet, tenant_salt(fleet.secret, "one"), ids)[0] in b"".join(on_disk.values())
    places |= on_disk
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


def places(answer: httpx.Response) -> dict[str, int]:
    """Return the cached tokens that came from elsewhere than the worker's pool, by place."""
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"]["prompt_tokens_details"].get("headstart", {}))


def explained(fleet: SecureFleet, prompt: str, tenant: str) -> list[dict[str, Any]]:
    url = f"{fleet.ops_url}/route/explain?path=/v1/completions&tenant={tenant}"
    answer = httpx.post(url, json={"model": "tiny", "prompt": prompt}, verify=fleet.trust, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    views: list[dict[str, Any]] = answer.json()["workers"]
    return views


def wanted(fleet: SecureFleet, worker: Worker, salt: bytes, prompt: str) -> bytes:
    """Return what a peer asks for that has a prompt under this salt."""
    member = unpack(fleet.ask_worker(worker, "/state"), WorkerState).member
    hashes = b"".join(chain(fleet, salt, prompt_ids(fleet, prompt)))
    return pack(BlocksWanted(member.epoch, member.layout, root_of(fleet, salt), 0, hashes))


class AnyRecord:
    """The format of the fleet's records, for a client that believes them: the test has no model to derive it from."""

    payload_bytes = 16 * 2 * 2 * 2 * 16 * 4
    """Tokens, layers, K and V, heads, dimensions, float32: of the tiny model."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def verifies(self, header: bytes, link: ChainLink, payload: memoryview) -> bool:
        return header[24:40] == link.block_hash


def test_peers_speak_tls_and_check_each_other(fleet: SecureFleet) -> None:
    """With the options of this fleet's workers a peer fetches; with another CA, or another name, it sends nothing."""
    token = gateway_token(fleet.secret)
    salt = tenant_salt(fleet.secret, "one")
    answer = fleet.post("one", completion(PROMPT.replace("page", "leaf")))
    holder = next(each for each in fleet.workers if each.name == answer.headers["x-headstart-worker"])
    member = unpack(fleet.ask_worker(holder, "/state"), WorkerState).member
    hashes = chain(fleet, salt, prompt_ids(fleet, PROMPT.replace("page", "leaf")))
    links = [ChainLink(each, hashes[n - 1] if n else root_of(fleet, salt), n) for n, each in enumerate(hashes)]
    payload = memoryview(bytearray(AnyRecord.payload_bytes))
    others = Authority(fleet.folder / "others")
    for ca, name, is_trusted in (
        (fleet.authority.path, WORKER_NAME, True),
        (fleet.authority.path, "other.name", False),
        (fleet.authority.path, None, False),
        (others.path, WORKER_NAME, False),
    ):
        client = PeerClient(AnyRecord(member.layout), token, ca_files(str(ca), name).context)
        try:
            with client.fetching(member.url, member.epoch, links) as reader:
                assert reader.read(links[0], payload, bytes)
                assert is_trusted
        except ssl.SSLError:
            assert not is_trusted


def test_blocks_on_disk_and_of_peers_open_to_their_tenant_alone(fleet: SecureFleet) -> None:
    """The last test of this module: one worker drains, so what it holds is fetched, over TLS and with the token."""
    prompt = PROMPT.replace("page", "folio")
    first = fleet.post("one", completion(prompt, seed=3, temperature=1))
    holder = first.headers["x-headstart-worker"]
    worker = next(each for each in fleet.workers if each.name == holder)
    wait_until(lambda: any(view["index_tokens"] for view in explained(fleet, prompt, "one")))
    own, other_salt = (tenant_salt(fleet.secret, tenant) for tenant in ("one", "two"))
    assert len(fleet.ask_worker(worker, "/blocks", wanted(fleet, worker, own, prompt))) > 10_000
    for salt in (other_salt, b"", tenant_salt(b"", "one")):
        assert fleet.ask_worker(worker, "/blocks", wanted(fleet, worker, salt, prompt)) == b""
    for headers in ({}, {"authorization": f"Bearer {fleet.keys['one']}"}, {"authorization": "Bearer x"}):
        answers = [fleet.send(worker, "/blocks", wanted(fleet, worker, salt, prompt), headers) for salt in (own, b"")]
        assert [answer.status_code for answer in answers] == [401, 401]
        assert answers[0].content == answers[1].content
    fleet.ask_worker(worker, "/drain", b"")
    wait_until(lambda: any(view["guard"] == "draining" for view in explained(fleet, prompt, "one")))
    for view in explained(fleet, prompt, "two"):
        assert (view["matched_tokens"], view["fetched_tokens"]) == (0, {})
        assert view["fetch_from"] is None
    for salt in (None, "one", tenant_salt(fleet.secret, "one").hex()):
        other = fleet.post("two", completion(prompt, seed=3, temperature=1, **({"cache_salt": salt} if salt else {})))
        assert (cached_tokens(other), places(other)) == (0, {})
    again = fleet.post("one", completion(prompt, seed=3, temperature=1))
    assert again.headers["x-headstart-worker"] != holder
    assert cached_tokens(again) == places(again).get("peer", 0), "it has come from the other, or been computed"
    assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]


def test_no_connection_holds_a_small_packet_back(fleet: SecureFleet) -> None:
    """With TLS other classes of the event loops carry the connections. `test_no_delay.py` asks those without."""
    with httpx.Client(verify=fleet.trust, timeout=HANG_S) as client:
        client.get(f"{fleet.url}/health/ready")
        client.get(f"{fleet.ops_url}/workers")
        for number in range(8):
            assert fleet.post("one", completion(f"{number} {PROMPT}")).status_code == 200
        workers = {worker.name: worker.port for worker in fleet.workers}
        accepted = {"gateway": fleet.gateway.port, "ops": fleet.gateway.ops_port, **workers}
        check_connections([part.pid for part in fleet.parts], accepted, workers)
