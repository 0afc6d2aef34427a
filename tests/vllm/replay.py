"""The blocks that an engine holds, by its replay from the first batch, read without the adapter's code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import msgpack
import zmq

from tests.waiting import HANG_S

END = (-1).to_bytes(8, "big", signed=True)


def batches(replay_endpoint: str, first: int = 0) -> list[bytes]:
    """Return the payloads of the batches that the engine has published since `first`; assert that none is missing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(replay_endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        payloads: list[bytes] = []
        while True:
            assert dealer.poll(round(1000 * HANG_S)), "the engine does not answer"
            frames = dealer.recv_multipart()
            if frames[-2] == END:
                return payloads
            assert int.from_bytes(frames[-2], "big") == first + len(payloads), "the replay has a hole"
            payloads.append(frames[-1])


class Held(NamedTuple):
    """Counts of the blocks that an engine holds."""

    num_blocks: int
    """Different ones, of the engine's size."""
    num_own_blocks: int
    """Distinct blocks of the index's size with a salt of the gateway's form, whose prefix is held, too."""


def held(replay_endpoint: str, own_block_size: int) -> Held:
    """Count what an engine holds now."""
    copies: Counter[int] = Counter()
    chains: dict[int, tuple[str, tuple[int, ...], int | None]] = {}
    """Salt, all tokens up to the block's end, and parent, by the engine's hash."""
    for payload in batches(replay_endpoint):
        for event in msgpack.unpackb(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    copies.update(event["block_hashes"])
                    _name(event, chains)
                case "BlockRemoved":
                    copies.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    copies.clear()
    assert not -copies, "removed more often than stored"
    held = set(+copies)
    own: set[tuple[str, tuple[int, ...]]] = set()
    for block in held:
        salt, tokens, parent = chains[block]
        while parent in held:
            parent = chains[parent][2]
        if parent is None and re.fullmatch("[0-9a-f]{32}", salt):
            ends = range(own_block_size, len(tokens) + 1, own_block_size)
            own.update((salt, tokens[:end]) for end in ends)
    return Held(len(held), len(own))


def _name(event: dict[str, Any], chains: dict[int, tuple[str, tuple[int, ...], int | None]]) -> None:
    parent, size = event["parent_block_hash"], event["block_size"]
    salt: str = (event["extra_keys"][0] or [""])[-1] if parent is None else ""
    tokens: tuple[int, ...] = ()
    for number, block in enumerate(event["block_hashes"]):
        if parent is not None:
            salt, tokens, _ = chains[parent]
        tokens = (*tokens, *event["token_ids"][number * size : (number + 1) * size])
        chains[block] = (salt, tokens, parent)
        parent = block
