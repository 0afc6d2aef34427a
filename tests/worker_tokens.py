"""The headers of a gateway, for tests that ask a worker with a cluster secret themselves."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from worker.common.proof import PROVE_PATH, Proof, gateway_token, instance_token, new_challenge, verifies
from worker.wire import unpack


def gateway_headers(secret: bytes, post: Callable[[str, bytes], bytes]) -> dict[str, str]:
    """Return the headers for the process at which `post` sends a body to a path."""
    challenge = new_challenge()
    return _headers(secret, challenge, post(PROVE_PATH, challenge))


async def headers_at(secret: bytes, http: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """Return the headers for the process at `url`."""
    challenge = new_challenge()
    async with http.post(url + PROVE_PATH, data=challenge) as answer:
        return _headers(secret, challenge, await answer.read())


def _headers(secret: bytes, challenge: bytes, answer: bytes) -> dict[str, str]:
    token, proof = gateway_token(secret), unpack(answer, Proof)
    assert verifies(proof, token, challenge)
    return {"authorization": f"Bearer {instance_token(token, proof.instance)}"}
