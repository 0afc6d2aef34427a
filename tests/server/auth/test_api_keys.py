"""The key file, the keys command, and the limits of a key."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Scope

from server import cli
from server.auth import identity
from server.auth.authentication import MAX_KEY_BYTES, Authenticator
from server.auth.identity import (
    MAX_FILE_BYTES,
    Identity,
    KeyFile,
    allowed_priority,
    digest_text,
    load_keys,
    parse_keys,
    tenant_identity,
    tenant_salt,
)
from server.auth.limits import AuthThrottle, KeyEntry, KeyUsage, duration_text, source_of
from server.cli.keys import new_key
from server.errors import AuthenticationError, OverloadedError


def entry(key: str, tenant: str = "one", extra: str = "") -> str:
    return f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{tenant}"\n{extra}\n'


def request(key: str | None, client: str = "192.0.2.1") -> Scope:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    return {"type": "http", "headers": headers, "client": (client, 1)}


def authenticator(tmp_path: Path, text: str, throttle: AuthThrottle | None = None) -> Authenticator:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    made = Authenticator(KeyFile(path, b"secret"), tenant_identity(b"secret", "default"))
    made.throttle = throttle or made.throttle
    return made


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[[keys]]\ndigest = "abc"\ntenant = "x"', "digest"),
        ('[[keys]]\ntenant = "x"', "digest"),
        (entry("k").replace('tenant = "one"', ""), "tenant"),
        (entry("k", extra="requests_per_minute = 0"), "requests_per_minute"),
        (entry("k", extra="rpm = 5"), "rpm"),
        (entry("k", extra='models = "all"'), "models"),
        (entry("k", tenant="line\\nbreak"), "tenant"),
        (entry("k") + entry("k", tenant="two"), "duplicate digest"),
        ("keys = 5", "keys"),
        ("not toml", "TOML"),
    ],
)
def test_a_bad_file_is_refused_by_the_field(text: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        parse_keys(text)


def test_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keys\.toml: No such file"):
        load_keys(tmp_path / "keys.toml")


def test_oversized_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("k") + "#" * MAX_FILE_BYTES)
    with pytest.raises(ValueError, match="larger than"):
        load_keys(path)


def test_valid_key_gives_its_identity(tmp_path: Path) -> None:
    extra = 'models = ["tiny"]\nrequests_per_minute = 5\nmay_prioritise = true'
    who = authenticator(tmp_path, entry("My API Key") + entry("second", "two", extra) + entry("third", "two"))
    one, two = who.authenticate(request("My API Key")), who.authenticate(request("second"))
    assert (one.tenant, one.salt, one.key.models, one.key.may_prioritise) == (
        "one",
        tenant_salt(b"secret", "one"),
        None,
        False,
    )
    assert (two.key.models, two.key.may_prioritise) == (frozenset({"tiny"}), True)
    assert (two.key.requests_per_minute, two.key.tokens_per_minute, two.key.max_streams) == (5, None, None)
    third = who.authenticate(request("third"))
    assert third.salt == two.salt != one.salt
    assert third.key.digest != two.key.digest, "a limit is one key's"
    assert tenant_identity(b"secret", "two").salt == two.salt
    assert allowed_priority(tenant_identity(b"secret", "two"), 3) == 3, "without keys, anyone may set one"


def test_oversized_key_is_refused(tmp_path: Path) -> None:
    key = "x" * (MAX_KEY_BYTES + 1)
    with pytest.raises(AuthenticationError):
        authenticator(tmp_path, entry(key)).authenticate(request(key))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"My API Key")],
        [(b"authorization", b"Basic My API Key")],
        [(b"authorization", b"Bearer My API Key"), (b"authorization", b"Bearer My API Key")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer My API Key")],
        [(b"x-api-key", b"My API Key"), (b"x-api-key", b"My API Key")],
        [(b"x-api-key", b"My API Key"), (b"authorization", b"Bearer other")],
        [(b"x-api-key", b"x" * 5000)],
        [(b"authorization", b"Bearer " + b"x" * 5000)],
    ],
)
def test_headers_that_hold_no_key(tmp_path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    scope = {**request(None), "headers": headers}
    with pytest.raises(AuthenticationError):
        authenticator(tmp_path, entry("My API Key")).authenticate(scope)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-api-key", b"My API Key")],
        [(b"x-api-key", b" My API Key ")],
        [(b"x-api-key", b"other"), (b"authorization", b"Bearer My API Key")],
    ],
)
def test_headers_that_hold_the_key(tmp_path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    scope = {**request(None), "headers": headers}
    assert authenticator(tmp_path, entry("My API Key")).authenticate(scope).tenant == "one"


def test_empty_key_file_refuses_all(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError):
        authenticator(tmp_path, "").authenticate(request(""))


def test_reload_and_a_bad_new_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("old"))
    outcomes: list[str] = []
    keys = KeyFile(path, b"secret", on_reload=outcomes.append)
    keys.reload_if_changed()
    assert outcomes == []
    path.write_text("nonsense [")
    with caplog.at_level(logging.ERROR):
        keys.reload_if_changed()
        keys.reload_if_changed()
    assert outcomes == ["rejected"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert keys.find(b"old") is not None
    new = tmp_path / "new.toml"
    new.write_text(entry("new"))
    os.replace(new, path)
    keys.reload_if_changed()
    assert outcomes == ["rejected", "loaded"]
    assert keys.find(b"old") is None
    assert keys.find(b"new") is not None
    path.unlink()
    keys.reload_if_changed()
    assert keys.find(b"new") is not None, "a missing file changes nothing"


def test_a_lookup_costs_the_same_for_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One digest and one blinding, whatever is in the file: no loop over the keys, and no comparison of digests."""
    path = tmp_path / "keys.toml"
    path.write_text("".join(entry(f"key {number}", f"t{number}") for number in range(20)))
    keys = KeyFile(path, b"secret")
    other = KeyFile(path, b"secret")
    assert not set(keys._identities) & set(other._identities), "blinded anew by each process"
    made: list[int] = []
    real = identity.blake2b
    monkeypatch.setattr(identity, "blake2b", lambda *args, **options: (made.append(1), real(*args, **options))[1])
    for key in (b"key 0", b"key 19", b"none", b""):
        made.clear()
        found = keys.find(key)
        assert (found is not None) == key.startswith(b"key")
        assert len(made) == 1


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]),
            st.sampled_from(["", "wrong", "other wrong", "one", "two", "three"]),
            st.floats(0.0, 3.0),
        ),
        max_size=120,
    ),
    st.integers(0, 120),
)
def test_no_wrong_key_costs_a_right_one(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[str, str, float]], restart_at: int
) -> None:
    """Whatever was sent before, from anywhere: a right key passes, and a source tests its allowance of wrong ones."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(entry("one", "one") + entry("two", "two") + entry("three", "three"))
    now_s = 1000.0

    def started() -> Authenticator:
        who = Authenticator(KeyFile(path, b"secret"), tenant_identity(b"secret", "default"))
        who.throttle = AuthThrottle(burst=3, per_s=0.5, clock=lambda: now_s)
        return who

    who, begun_s, refused = started(), now_s, Counter[str]()
    for number, (client, key, wait_s) in enumerate(asked):
        if number == restart_at:
            who, begun_s, refused = started(), now_s, Counter[str]()
        now_s += wait_s
        if key in ("one", "two", "three"):
            assert who.authenticate(request(key, client)).tenant == key
            continue
        with pytest.raises((AuthenticationError, OverloadedError)) as error:
            who.authenticate(request(key, client))
        refused[source_of(request(None, client))] += error.type is AuthenticationError
        assert max(refused.values()) <= 3 + 0.5 * (now_s - begun_s)


def test_the_answer_to_a_wrong_key_says_when_to_retry(tmp_path: Path) -> None:
    now_s = 1000.0
    who = authenticator(tmp_path, entry("good"), AuthThrottle(burst=3, per_s=0.5, clock=lambda: now_s))
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            who.authenticate(request("guess"))
    for _ in range(100):
        with pytest.raises(OverloadedError) as refused:
            who.authenticate(request("guess"))
        assert refused.value.retry_after_s == pytest.approx(2.0)
    assert who.authenticate(request("good")).tenant == "one"
    with pytest.raises(AuthenticationError):
        who.authenticate(request("guess", "192.0.2.2"))
    now_s += 2.0
    with pytest.raises(AuthenticationError):
        who.authenticate(request("guess"))


def test_a_source_may_send_20_wrong_keys_and_then_one_in_5_s() -> None:
    throttle = AuthThrottle(clock=lambda: 1000.0)
    for _ in range(20):
        throttle.failed("192.0.2.1")
    with pytest.raises(OverloadedError) as refused:
        throttle.failed("192.0.2.1")
    assert refused.value.retry_after_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("client", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_a_source_is_a_network_of_one_client(client: str, source: str) -> None:
    assert source_of({"client": (client, 1)}) == source


def test_sources_are_bounded() -> None:
    throttle = AuthThrottle()
    for number in range(30_000):
        throttle.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(throttle._allowances) == 10_000


def limited(clock: Callable[[], float] = lambda: 50.0, **limits: int) -> KeyUsage:
    usage = KeyUsage(clock=clock)
    usage.apply(KeyEntry(tenant="t", digest="", **limits))
    return usage


async def test_requests_a_minute() -> None:
    now_s = 50.0
    usage = limited(lambda: now_s, requests_per_minute=6)
    for remaining in range(5, -1, -1):
        await usage.admit()
        assert (b"x-ratelimit-remaining-requests", b"%d" % remaining) in usage.headers()
    with pytest.raises(OverloadedError) as refused:
        await usage.admit()
    assert refused.value.retry_after_s == pytest.approx(10.0)
    assert (b"x-ratelimit-reset-requests", b"1m0s") in usage.headers()
    assert (b"retry-after", b"10") in refused.value.headers()
    now_s += 10.0
    await usage.admit()
    assert Identity(b"", KeyEntry(digest="", tenant="t")).usage is None, "no limits, no usage"


def test_tokens_a_minute_may_be_overdrawn() -> None:
    now_s = 50.0
    usage = limited(lambda: now_s, tokens_per_minute=600)
    usage.take_tokens(400)
    assert (b"x-ratelimit-remaining-tokens", b"200") in usage.headers()
    usage.add_tokens(260)
    with pytest.raises(OverloadedError) as refused:
        usage.take_tokens(40)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    now_s += 10.0
    usage.take_tokens(40)
    now_s += 60.0
    usage.take_tokens(10_000)  # more than a minute's worth goes through a full bucket, and is waited for after
    with pytest.raises(OverloadedError) as refused:
        usage.take_tokens(1)
    assert refused.value.retry_after_s == pytest.approx(940.1)


async def test_refused_request_does_not_count_as_open() -> None:
    usage = limited(max_streams=1, requests_per_minute=1)
    await usage.admit()
    usage.close()
    for _ in range(3):
        with pytest.raises(OverloadedError, match="a minute"):
            await usage.admit()


async def test_prompts_admitted_together_do_not_overspend_the_day() -> None:
    """They are admitted before their bodies come, when all of the budget is left."""
    usage = KeyUsage()
    usage.apply(KeyEntry(digest="sha256:" + "0" * 64, tenant="t", tokens_per_day=1000))
    for _ in range(3):
        await usage.admit()
    usage.take_tokens(900)
    usage.take_tokens(900)  # a last one may overdraw
    with pytest.raises(OverloadedError, match="a day"):
        usage.take_tokens(900)


def test_a_reloaded_limit_keeps_what_was_used(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("k", extra="tokens_per_minute = 600"))
    keys = KeyFile(path, b"")

    def usage() -> KeyUsage:
        found = keys.find(b"k")
        assert found is not None
        assert found.usage is not None
        return found.usage

    usage().take_tokens(500)
    path.write_text(entry("k", extra="tokens_per_minute = 300"))
    keys.reload()
    with pytest.raises(OverloadedError, match="300 tokens"):
        usage().take_tokens(200)
    path.write_text(entry("other"))
    keys.reload()
    path.write_text(entry("k", extra="tokens_per_minute = 300"))
    keys.reload()
    usage().take_tokens(200)  # the usage of a key that was taken away is forgotten


def test_a_replaced_entry_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("k"))
    keys = KeyFile(path, b"secret")
    who = Authenticator(keys, tenant_identity(b"secret", "default"))
    for number in range(1, 20):
        path.write_text(entry("k", extra=f"max_streams = {number}") + "#" * number)
        keys.reload_if_changed()
        assert who.authenticate(request("k")).key.max_streams == number


@pytest.mark.parametrize(("seconds", "text"), [(0.12, "120ms"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s")])
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    options = ["--name", "laptop", "--models", "tiny", "--requests-per-minute", "5", "--may-prioritise"]
    options.append("--trusted-front")
    assert cli.main(["keys", "new", "--tenant", "research", *options, "--file", str(file)]) == 0
    key = capsys.readouterr().out.strip()
    assert cli.main(["keys", "new", "--tenant", "other"]) == 0
    shown = capsys.readouterr().out
    assert key.startswith("hs-")
    assert key not in file.read_text()
    file.write_text(file.read_text() + shown)
    keys = KeyFile(file, b"")
    found = keys.find(key.encode())
    assert found is not None
    assert found.key.trusted_front
    assert (found.tenant, found.key.name, found.key.models, found.key.requests_per_minute) == (
        "research",
        "laptop",
        frozenset({"tiny"}),
        5,
    )
    assert len(keys) == 2
    assert cli.main(["keys", "check", str(file)]) == 0
    assert "2 keys" in capsys.readouterr().out


def test_the_command_takes_an_existing_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("My API Key\n"))
    assert cli.main(["keys", "digest", "--tenant", "one"]) == 0
    captured = capsys.readouterr()
    assert parse_keys(captured.out).keys[0].digest == digest_text(b"My API Key")
    assert "can be guessed" in captured.err


@pytest.mark.parametrize("options", [["--tenant", "a\nb"], ["--tenant", ""], ["--tenant", "x", "--max-streams", "0"]])
def test_the_command_refuses_what_the_file_would(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "new", *options]) == 2
    assert "headstart keys:" in capsys.readouterr().err


def test_the_command_leaves_a_broken_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    for broken in (b"broken [", b"\xff"):
        file.write_bytes(broken)
        assert cli.main(["keys", "new", "--tenant", "x", "--file", str(file)]) == 2
        assert file.read_bytes() == broken
        out, error = capsys.readouterr()
        assert ("hs-" in out, f"{file}: " in error) == (False, True)


def test_keys_are_random() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) > 40
