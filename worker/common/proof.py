"""Proofs of identity between members of a fleet with a cluster secret. No secret crosses the network.

    gateway -> worker    POST /prove with a random challenge; the answer is a Proof
    gateway -> worker    on the same connection all else, with the token of the instance that has proven itself
    worker  -> peer      POST /blocks or /adopt, with the token of the peer's epoch, which EPOCH_HEADER names

A proof is for one challenge and one URL. Without the secret it cannot be forged, repeated or forwarded. An instance is
one process. The tokens of an ended instance or epoch grant no access. All of it is derived from `gateway_token`, which
never leaves a process.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

PROVE_PATH: Final = "/prove"
EPOCH_HEADER: Final = "x-headstart-epoch"
CHALLENGE_BYTES: Final = 32  # none ever comes twice
MAX_PROOF_BYTES: Final = 4096  # a proof has some 200, and it is read before anything is verified
_PORTS: Final = {"http": 80, "https": 443}


class Proof(Struct, frozen=True):
    """A worker's answer to a challenge."""

    url: str
    """Where its fleet finds it."""
    instance: str
    """Names its process."""
    mac: bytes


def gateway_token(cluster_secret: bytes) -> str:
    """Derive the token of the fleet, from which the others come; empty without a secret: then there are none."""
    if not cluster_secret:
        return ""
    return hmac.digest(cluster_secret, b"headstart gateway to worker\0", "sha256").hex()


def new_instance() -> str:
    return secrets.token_hex(16)


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def prove(token: str, challenge: bytes, url: str, instance: str) -> Proof:
    """Answer a challenge. `token` is the `gateway_token` of the fleet."""
    return Proof(url, instance, _mac(token, b"proof", challenge, url.encode(), instance.encode()))


def verifies(proof: Proof, token: str, challenge: bytes) -> bool:
    """Return whether a worker of the fleet has made the proof, for this challenge."""
    return hmac.compare_digest(proof.mac, prove(token, challenge, proof.url, proof.instance).mac)


def instance_token(token: str, instance: str) -> str:
    """Return what a gateway shows to an instance that has proven itself."""
    return _mac(token, b"instance", instance.encode()).hex()


def epoch_token(token: str, epoch: str) -> str:
    """Return the token for a peer in this epoch."""
    return _mac(token, b"epoch", epoch.encode()).hex()


def is_same_endpoint(url: str, other: str) -> bool:
    """Return whether two base URLs name the same scheme, host and port. Raises ValueError for what is no URL."""
    return _endpoint(url) == _endpoint(other)


def _endpoint(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _mac(token: str, *parts: bytes) -> bytes:
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(token.encode(), b"headstart member\0" + message, "sha256")
