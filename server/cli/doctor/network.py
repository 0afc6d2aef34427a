"""Redis, and the ports that a gateway will take."""

from __future__ import annotations

import re
import socket
import subprocess
from typing import Final

import aiohttp

from cache.redis_index import ClientSettings, RedisDownError, diagnose
from server.cli.doctor.check import Check
from server.cli.serve.redis import RedisMissingError, find_redis_server

GOOD_VERSION: Final = (7,)
OLDEST_VERSION: Final = (6, 2)
SLOW_PING_S: Final = 0.002
TIMEOUT_S: Final = 3.0
_WANT_7: Final = "install Redis 7 or newer, which has read-only scripts and finer ACLs"


def embedded_redis() -> Check:
    """What `headstart serve` would start."""
    try:
        binary = find_redis_server()
    except RedisMissingError as error:
        return Check("redis", "fail", "no redis-server", str(error))
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("redis", "fail", f"{binary} does not run: {error}", "install redis-server, or pass --redis URL")
    match = re.search(r"v=([\d.]+)", told)
    version = tuple(int(part) for part in match[1].split(".")) if match else ()
    found = f"{'.'.join(map(str, version)) or 'unknown version'} at {binary}, started when needed"
    return _by_version(version, found)


async def redis_at(url: str, username: str | None, password: str | None) -> Check:
    try:
        facts = await diagnose(url, ClientSettings(username, password, connect_timeout_s=TIMEOUT_S))
    except ValueError as error:
        return Check("redis", "fail", str(error), "correct --redis")
    except RedisDownError as error:
        return Check("redis", "fail", f"{_bare(url)}: {error}", _advice(str(error)))
    version = ".".join(map(str, facts.version)) or "of unknown version"
    found = (
        f"Redis {version} at {_bare(url)}, PING {1000 * facts.ping_s:.2f} ms, {facts.used_bytes / 2**20:,.0f} MiB used"
    )
    if facts.max_bytes and facts.eviction not in ("noeviction", ""):
        found += f", evicts by {facts.eviction} at {facts.max_bytes / 2**20:,.0f} MiB"
        return Check("redis", "warn", found, "set maxmemory-policy noeviction: a lost set is written anew each time")
    if facts.ping_s > SLOW_PING_S:
        mend = "put Redis near the gateways: past --lookup-deadline-s they route without it"
        return Check("redis", "warn", found, mend)
    return _by_version(facts.version, found)


def _by_version(version: tuple[int, ...], found: str) -> Check:
    if version and version < OLDEST_VERSION:
        return Check("redis", "fail", found, _WANT_7)
    if version and version < GOOD_VERSION:
        return Check("redis", "warn", found, _WANT_7)
    return Check("redis", "ok", found)


def _advice(reason: str) -> str:
    lowered = reason.lower()
    if "auth" in lowered or "wrongpass" in lowered or "password" in lowered:
        return "give the user and password: --redis-username, --redis-password-file, or in the URL"
    if "ssl" in lowered or "certificate" in lowered:
        return "use rediss:// for TLS, with ?ssl_ca_certs=FILE for a CA of your own"
    return "start it there, or correct --redis; without it gateways route by their own memory alone"


def _bare(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


async def port(name: str, host: str, number: int, option: str) -> Check:
    """Free, or already Headstart's own."""
    try:
        family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.create_server((host, number), family=family):
            return Check(name, "ok", f"{host}:{number} is free")
    except PermissionError:
        return Check(name, "fail", f"{host}:{number} may not be taken", f"choose one above 1023 with {option}")
    except OSError as error:
        if error.errno not in (98, 48):  # in use, on Linux and on macOS
            return Check(name, "fail", f"{host}:{number}: {error}", f"choose another address or port with {option}")
    workers = await _workers_of_gateway(host, number)
    if workers == 0:
        mend = "start workers on its Redis: `headstart worker --redis URL`; /dashboard of its ops port shows them"
        return Check(name, "warn", f"a Headstart gateway serves at {host}:{number}, and no worker", mend)
    if workers is not None:
        plural = "" if workers == 1 else "s"
        return Check(name, "ok", f"a Headstart gateway serves at {host}:{number}, with {workers} worker{plural}")
    mend = f"end that program (`ss -ltnp 'sport = :{number}'` names it), or choose another with {option}"
    return Check(name, "fail", f"{host}:{number} is taken by another program", mend)


async def _workers_of_gateway(host: str, number: int) -> int | None:
    """Of a gateway that answers there, with a certificate or without; None: no gateway does."""
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    netloc = f"{f'[{address}]' if ':' in address else address}:{number}"
    for scheme in ("http", "https"):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.get(f"{scheme}://{netloc}/health/ready", ssl=False) as response,
            ):
                if response.status == 503 and "x-request-id" in response.headers:
                    return 0
                detail = await response.json(content_type=None)
                return int(detail["workers"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, OSError):
            continue
    return None
