"""The prompts that an adapter remembers: within their bound, tenants apart, a longer one instead of its prefixes."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import decode_tokens, hash_chain
from cache.types import BlockHash, MediaStart
from tests.worker.adapter.rig import OTHER_ROOT, ROOT, make_request
from worker.adapter.recent_prompts import MIN_BLOCKS, RecentPrompts
from worker.contracts.exchange import MAX_CHAINS_BYTES, OfferedChain
from worker.wire import GenerateRequest, pack, unpack

SIZE = 4


class Prompt(NamedTuple):
    root: bytes
    adapter: str
    blocks: tuple[int, ...]
    num_rest: int = 0

    def request(self) -> GenerateRequest:
        ids = [block for block in self.blocks for _ in range(SIZE)] + [9] * self.num_rest
        return make_request(ids, root=self.root, adapter=self.adapter)


def note(prompts: RecentPrompts, request: GenerateRequest) -> None:
    prompts.note(request, hash_chain(BlockHash(request.root), request.prompt_ids, SIZE))


def shown(chain: OfferedChain) -> Prompt:
    """The prompt of a chain, which has exactly the hashes of its tokens under its root."""
    ids = decode_tokens(chain.token_ids)
    assert chain.block_hashes() == hash_chain(BlockHash(chain.root), ids, SIZE)
    return Prompt(chain.root, chain.adapter, tuple(ids[::SIZE]))


PROMPTS = st.builds(
    Prompt,
    st.sampled_from([ROOT, OTHER_ROOT]),
    st.sampled_from(["", "pirate"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
    st.integers(0, SIZE - 1),
)


@given(noted=st.lists(PROMPTS, max_size=30), max_bytes=st.integers(0, 6000), max_blocks=st.integers(0, 60))
def test_what_is_kept(noted: list[Prompt], max_bytes: int, max_blocks: int) -> None:
    prompts, before = RecentPrompts(SIZE, max_bytes), 0
    for prompt in noted:
        note(prompts, prompt.request())
        kept = prompts.latest(1 << 16)
        size = sum(len(each.hashes) + len(each.token_ids) + len(each.adapter) for each in kept)
        assert size <= prompts.num_bytes <= max_bytes, "in memory"
        assert len(pack(kept)) <= max_bytes + 5, "in an answer, with the head of its list"
        for newer, older in pairwise(shown(each) for each in kept):
            assert newer != older
        for each in kept:
            found = shown(each)
            assert len(found.blocks) >= MIN_BLOCKS
            assert any(found == other._replace(num_rest=0) for other in noted), "of that tenant and adapter"
        if len(prompt.blocks) >= MIN_BLOCKS and prompts.num_bytes > before:
            assert shown(kept[0]) == prompt._replace(num_rest=0), "the latest comes first"
        before = prompts.num_bytes
    hashes = [each for chain in prompts.latest(max_blocks) for each in chain.block_hashes()]
    assert len(set(hashes)) <= max_blocks
    prompts.clear()
    assert prompts.num_bytes == 0
    assert prompts.latest(max_blocks) == []


def test_a_longer_prompt_replaces_its_prefixes() -> None:
    prompts, turns = RecentPrompts(SIZE), [tuple(range(count)) for count in (4, 6, 9)]
    for turn in turns:
        note(prompts, Prompt(ROOT, "", turn, 2).request())
        note(prompts, Prompt(OTHER_ROOT, "", turn).request())
    kept = [shown(each) for each in prompts.latest(100)]
    assert kept == [Prompt(OTHER_ROOT, "", turns[-1]), Prompt(ROOT, "", turns[-1])]
    last_only = RecentPrompts(SIZE)
    for root in (ROOT, OTHER_ROOT):
        note(last_only, Prompt(root, "", turns[-1]).request())
    assert prompts.num_bytes == last_only.num_bytes, "the prefixes take no memory"
    note(prompts, Prompt(ROOT, "", turns[-1]).request())
    assert shown(prompts.latest(100)[0]) == Prompt(ROOT, "", turns[-1]), "used again"
    assert len(prompts.latest(100)) == 2
    assert [shown(each).root for each in prompts.latest(9)] == [ROOT]


def test_a_prompt_of_a_peer_is_older_than_its_own() -> None:
    """Those of a peer come with the latest first, and stay in that order."""
    prompts = RecentPrompts(SIZE)
    note(prompts, Prompt(ROOT, "", (9, 9, 9, 9)).request())
    for number in (3, 2, 1):
        request = Prompt(ROOT, "", (number,) * 4).request()
        prompts.note(request, hash_chain(BlockHash(ROOT), request.prompt_ids, SIZE), is_latest=False)
    assert [shown(each).blocks[0] for each in prompts.latest(100)] == [9, 3, 2, 1]


def test_prompts_with_images_are_not_kept() -> None:
    prompts, request = RecentPrompts(SIZE), Prompt(ROOT, "", tuple(range(9))).request()
    note(prompts, msgspec.structs.replace(request, media=(MediaStart("image", 3),)))
    assert prompts.latest(100) == []


@pytest.mark.parametrize("token_ids", [b"x" * (MAX_CHAINS_BYTES + 4), 7, [1]])
def test_tokens_that_no_peer_sends(token_ids: object) -> None:
    message = {"root": ROOT, "hashes": b"", "token_ids": token_ids}
    with pytest.raises(ValueError, match="token_ids"):
        unpack(pack(message), OfferedChain)
