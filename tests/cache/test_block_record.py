from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block_record import HEADER_BYTES, RecordFormat, layout_fingerprint
from cache.types import BlockHash, ChainLink

LAYOUT = layout_fingerprint(
    namespace="0e60788967df6511e0ec98df046d1783",
    files="5e884898da28047151d0e56f8dc62927",
    numerics="cpu-float32",
    dtype="float32",
    shape=(30, 3, 64, 16),
)
LINK = ChainLink(BlockHash(b"h" * 16), BlockHash(b"p" * 16), 7)
PAYLOAD = memoryview(bytes(range(64)))
FORMAT = RecordFormat(LAYOUT, 64, b"secret")


def test_golden_vectors() -> None:
    """Files and other workers hold these bytes: a change needs another FORMAT_VERSION."""
    assert LAYOUT.hex() == "df7d604992dac7f0c7f716b28b368bed"
    assert FORMAT.fingerprint == "85599bee8c233c4b523297bf9f0e0ec1"
    assert RecordFormat(LAYOUT, 64).fingerprint == "bfead6fcfc5998ac5bbe901fa222e820"
    header = FORMAT.header(LINK, PAYLOAD)
    assert len(header) == HEADER_BYTES
    assert header[-16:].hex() == "c8f2f6dce3ab0e54f934bc48cca290d5"
    assert RecordFormat(LAYOUT, 64).header(LINK, PAYLOAD)[-16:].hex() == "4847efb711449f716bd43e0d753b94f6"


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.binary())
def test_a_record_verifies_and_names_its_block(block_hash: bytes, parent: bytes, depth: int, secret: bytes) -> None:
    record = RecordFormat(LAYOUT, 64, secret)
    link = ChainLink(BlockHash(block_hash), BlockHash(parent), depth)
    header = record.header(link, PAYLOAD)
    assert record.verifies(header, link, PAYLOAD)
    assert record.find_link(header) == link


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_every_flipped_bit_shows(secret: bytes) -> None:
    record = RecordFormat(LAYOUT, 64, secret)
    whole = record.header(LINK, PAYLOAD) + PAYLOAD
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        assert not record.verifies(changed[:HEADER_BYTES], LINK, memoryview(changed)[HEADER_BYTES:]), f"bit {bit}"
        is_named = record.find_link(bytes(changed[:HEADER_BYTES])) == LINK
        assert is_named == (bit // 8 >= HEADER_BYTES - 16), f"bit {bit}"


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 16, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_none(length: int) -> None:
    header = (FORMAT.header(LINK, PAYLOAD) + b"x")[:length]
    assert not FORMAT.verifies(header, LINK, PAYLOAD)
    assert FORMAT.find_link(header) is None


def test_a_payload_of_another_length_is_none() -> None:
    assert not FORMAT.verifies(FORMAT.header(LINK, PAYLOAD), LINK, PAYLOAD[:-1])


def test_a_record_is_no_other_blocks() -> None:
    header = FORMAT.header(LINK, PAYLOAD)
    other = BlockHash(b"o" * 16)
    for link in (
        ChainLink(other, LINK.parent, LINK.depth),
        ChainLink(LINK.block_hash, other, LINK.depth),
        ChainLink(LINK.block_hash, LINK.parent, 0),
    ):
        assert not FORMAT.verifies(header, link, PAYLOAD)


FOREIGN = {
    "another secret": RecordFormat(LAYOUT, 64, b"other"),
    "no secret": RecordFormat(LAYOUT, 64),
    "another layout": RecordFormat(bytes(16), 64, b"secret"),
    "another size": RecordFormat(LAYOUT, 63, b"secret"),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_record_is_none(foreign: RecordFormat) -> None:
    payload = PAYLOAD[: foreign.payload_bytes]
    header = foreign.header(LINK, payload)
    assert foreign.fingerprint != FORMAT.fingerprint
    assert not FORMAT.verifies(header, LINK, payload)
    assert FORMAT.find_link(header) is None


def test_with_a_secret_the_digest_is_a_mac() -> None:
    """Knowing the format and every field, but not the secret, is not enough to make a record."""
    plain = RecordFormat(LAYOUT, 64).header(LINK, PAYLOAD)
    own = FORMAT.header(LINK, PAYLOAD)
    assert not FORMAT.verifies(own[:-16] + plain[-16:], LINK, PAYLOAD)
    assert FORMAT.find_link(own[:-24] + plain[-24:]) is None


def test_every_part_of_the_layout_counts() -> None:
    texts, shape = {"namespace": "n", "files": "f", "numerics": "c", "dtype": "float32"}, [2, 3, 4, 5]
    make: Callable[..., bytes] = layout_fingerprint
    prints = {make(**texts, shape=shape)}
    prints |= {make(**texts | {name: text + "x"}, shape=shape) for name, text in texts.items()}
    prints |= {make(**texts, shape=[*shape[:at], 9, *shape[at + 1 :]]) for at in range(len(shape))}
    assert len(prints) == 1 + len(texts) + len(shape)


@pytest.mark.parametrize("payload_bytes", [0, -1, (1 << 30) + 1])
def test_a_payload_that_no_call_can_move_is_refused(payload_bytes: int) -> None:
    with pytest.raises(ValueError, match="bytes of KV"):
        RecordFormat(LAYOUT, payload_bytes)
