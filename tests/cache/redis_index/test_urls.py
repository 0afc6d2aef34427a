"""The URLs and prefixes that an index takes, without a Redis."""

from __future__ import annotations

import pytest

from cache.redis_index import ReaderSettings, RedisIndex, check_url


@pytest.mark.parametrize("url", ["http://x", "redis+sentinel://h:1", "redis+cluster://", "foo"])
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="Redis URL"):
        RedisIndex(url)
    with pytest.raises(ValueError, match=r"^--redis: .*Redis URL"):
        check_url("--redis", url)


@pytest.mark.parametrize("url", ["redis+sentinel://[::1]:1/name", "redis+cluster://[fd00::1]:1,[fd00::2]"])
def test_a_url_may_name_hosts_by_their_ipv6_addresses(url: str) -> None:
    (health,) = RedisIndex(url).health()
    assert health["redis"] == url


@pytest.mark.parametrize(
    "url", ["redis://user:s3cret@h:1/0", "redis://h:1?password=s3cret", "redis+cluster://:s3cret@h:1,h:2"]
)
def test_health_shows_no_password(url: str) -> None:
    (health,) = RedisIndex(url).health()
    assert "s3cret" not in health["redis"]
    assert "h:1" in health["redis"]


@pytest.mark.parametrize("prefix", ["", "a{b}", "x y", "p" * 200])
def test_an_unusable_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="key prefix"):
        RedisIndex("redis://localhost", ReaderSettings(prefix=prefix))
