"""Events without salts, as SGLang sends them: a block belongs to the one tenant whose requests have its tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.events import Removed, Stored
from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.block_events import replay
from tests.worker.adapter.fake_blocks import OTHER, ROOT, FakeEngine, stored
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import BlockRemoved


def sglang_blocks() -> EngineBlocks:
    return EngineBlocks(2, max_names=100, matches_requests=True)


def test_a_block_without_salt_belongs_to_the_only_claimant() -> None:
    """One tenant's requests have its tokens."""
    blocks = sglang_blocks()
    assert blocks.claim(ROOT, range(4)) == []
    chain = hash_chain(ROOT, range(6), 2)
    assert blocks.apply([stored(1, 2, 3, tokens=range(6))]).events == [Stored(chain[0]), Stored(chain[1])]
    assert blocks.claim(ROOT, range(6)) == [Stored(chain[2])]  # the output is known at the end
    assert blocks.num_matched_tokens(chain, 7) == 6
    assert blocks.apply([BlockRemoved((2,))]).events == [Removed(chain[2]), Removed(chain[1])]


def test_without_salts_two_tenants_with_one_block_get_none() -> None:
    blocks = sglang_blocks()
    blocks.claim(ROOT, [0, 1, 2, 3])
    held = blocks.apply([stored(1, 2), stored(3, parent=1, tokens=(8, 9))]).events
    assert len(held) == 2
    removed = blocks.claim(OTHER, [0, 1, 8, 9])
    assert removed == [Removed(stored.block_hash) for stored in reversed(held)]  # type: ignore[union-attr]
    assert blocks.claim(OTHER, [0, 1, 8, 9]) == blocks.visible_events() == []
    assert blocks.apply([stored(4, tokens=(5, 5))]).events == []
    assert blocks.claim(OTHER, [5, 5]) == [Stored(hash_chain(OTHER, [5, 5], 2)[0])]


def test_with_salts_requests_decide_nothing() -> None:
    blocks = EngineBlocks(2, max_names=100)
    assert blocks.claim(ROOT, range(4)) == []
    assert blocks.apply([stored(1, 2)]).events == []
    assert blocks.tree.num_opaque == 2


PROMPT = st.lists(st.integers(0, 1), min_size=2, max_size=8)
Step = tuple[str, BlockHash | None, list[int]]
STEP: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from((ROOT, OTHER)), PROMPT),
    st.tuples(st.just("serve"), st.none(), PROMPT),
    st.tuples(st.just("evict"), st.none(), PROMPT),
    st.tuples(st.just("lose"), st.none(), st.just([])),
)


@given(st.lists(STEP, max_size=30))
def test_without_salts_published_is_held_and_claimed_by_one(
    steps: list[tuple[str, BlockHash | None, list[int]]],
) -> None:
    blocks = sglang_blocks()
    engine = FakeEngine(2)
    claims: dict[tuple[int, ...], set[BlockHash]] = {}
    published: set[BlockHash] = set()
    is_exact = True
    for what, root, tokens in steps:
        match what:
            case "claim":
                assert root is not None
                for end in range(2, len(tokens) + 1, 2):
                    claims.setdefault(tuple(tokens[:end]), set()).add(root)
                replay(blocks.claim(root, tokens), published)
            case "serve":
                engine.serve(tokens[: len(tokens) // 2 * 2], None, None, None)
            case "evict":
                for block in reversed(engine.chain(tokens[: len(tokens) // 2 * 2], None, None)):
                    if block.key in engine.copies:
                        engine.evict(block.key)
            case "lose":
                replay(blocks.forget_held(), published)
                is_exact = False
        replay(blocks.apply(engine.take_events()).events, published)
        expected: set[BlockHash] = set()
        for key in engine.copies:
            tokens_held = engine.blocks[key].tokens
            if engine.is_findable(key) and all(
                len(claims.get(tokens_held[:end], ())) == 1 for end in range(2, len(tokens_held) + 1, 2)
            ):
                (owner,) = claims[tokens_held]
                expected.add(hash_chain(owner, tokens_held, 2)[-1])
        assert published <= expected
        assert published == replay(blocks.visible_events())
        assert published == expected or not is_exact


def test_claims_are_bounded_and_those_on_held_blocks_stay() -> None:
    blocks = EngineBlocks(2, max_names=4, matches_requests=True)
    blocks.claim(ROOT, [1, 1, 2, 2])
    held = blocks.apply([stored(1, 2, tokens=[1, 1, 2, 2])]).events
    for token in range(10, 40):
        blocks.claim(ROOT, [token, token])
    assert blocks.apply([stored(3, tokens=[10, 10])]).events == []  # forgotten
    assert len(blocks.apply([stored(4, tokens=[39, 39])]).events) == 1
    assert blocks.claim(OTHER, [1, 1]) == [Removed(stored.block_hash) for stored in reversed(held)]  # type: ignore[union-attr]
