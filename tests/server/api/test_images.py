"""Images for engines that take them: names, bounds, places in the prompt, and the workers that they go to."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest
import yarl
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from tokenizers import Tokenizer
from urllib3.util import parse_url

from cache.hashing import MediaStart, hash_chain
from server.api.engine.media import image_name, read_media
from server.config import GatewayConfig
from server.errors import InvalidRequestError
from server.event_loop import run_now
from tests.server.api.engine_worker import engine_gateway
from tests.server.api.seeing_engine import (
    CHAT,
    MESSAGES,
    NUM_PLACEHOLDERS,
    RESPONSES,
    SeeingWorker,
    body_of,
    data_url,
    in_base64,
    part_of,
    png,
)
from tests.server.test_app import post, post_once
from tests.waiting import HANG_S
from worker.common.capabilities import IMAGES
from worker.wire import Failed, Rendered, TokenizerBundle

ROUTES = (CHAT, MESSAGES, RESPONSES)
SALT = bytes(32)


def rules(max_bytes: int, *hosts: str) -> GatewayConfig:
    return GatewayConfig(
        workers=("http://127.0.0.1:9",), max_images=2, max_image_bytes=max_bytes, image_hosts=frozenset(hosts)
    )


RULES = rules(1000, "images.example", "other.example:8443")
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture
def engine(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> SeeingWorker:
    return SeeingWorker(bundle, tokenizer=raw_tokenizer)


def text_part(path: str, text: str = "What is this?") -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": text}


@pytest.mark.parametrize("path", ROUTES)
async def test_images_are_part_of_the_prompts_hashes(engine: SeeingWorker, path: str) -> None:
    """The worker gets their names and places, and the body with them."""
    images = [png(1), png(2)]
    body = body_of(path, text_part(path), *[part_of(path, data_url(image)) for image in images])
    async with engine_gateway(engine) as target:
        status, _, raw = await post(target.url, body, path)
        assert status == 200, raw
        (request,), (placed,) = engine.received, target.router.placements
    assert [start.position for start in request.media] == [0, NUM_PLACEHOLDERS]
    assert placed.request.hashes == hash_chain(request.root, request.prompt_ids, 16, request.media)
    assert IMAGES in placed.request.needs
    assert request.call is not None
    assert [url for url, _ in engine.seen] == [data_url(image) for image in images]
    names = [start.identity for start in request.media]
    if path != MESSAGES:
        assert [name for _, name in engine.seen] == names
    assert len(set(names)) == 2


async def names_of(engine: SeeingWorker, *parts: dict[str, Any], path: str = CHAT, **fields: Any) -> list[str | None]:
    """Return the names that the images of a body get."""
    engine.seen = []
    async with engine_gateway(engine, image_hosts=RULES.image_hosts) as target:
        status, _, raw = await post(target.url, body_of(path, *parts, **fields), path)
    assert status == 200, raw
    return [name for _, name in engine.seen]


async def test_names_depend_on_bytes_and_salt_alone(engine: SeeingWorker) -> None:
    """A client's own name is replaced, in whatever form the part comes."""
    url = data_url(png(1))
    forms = [
        part_of(CHAT, url),
        part_of(CHAT, url, uuid="of the client"),
        {"image_url": {"url": url, "detail": "low"}, "uuid": None},
        {"type": "input_image", "image_url": url, "uuid": "x"},
        part_of(CHAT, url.replace("image/png", "image/jpeg;a=b").replace("data:", "DATA:")),
    ]
    found = [(await names_of(engine, form))[0] for form in forms]
    (again,) = await names_of(engine, part_of(RESPONSES, url), path=RESPONSES)
    assert len({*found, again}) == 1
    (salted,) = await names_of(engine, part_of(CHAT, url), cache_salt="a")
    (other,) = await names_of(engine, part_of(CHAT, data_url(png(2))))
    (fetched,) = await names_of(engine, part_of(CHAT, "https://images.example/a.png"))
    assert len({again, salted, other, fetched, "of the client", "x"}) == 6


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,AAAA=AAA", "base64"),
        ("data:image/png;base64,AAA", "base64"),
        ("data:image/png;base64,A A=", "base64"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png;base64," + in_base64(bytes(1001)), "more than 1000 bytes"),
        (data_url(b"GIF89a" + bytes(40)), "the engine cannot read"),
        (data_url(png()[:-20]), "the engine cannot read"),
        (data_url(png(size=(60_000, 60_000), pixels=b"")), "the engine cannot read"),
    ],
)
async def test_images_that_are_none_are_named(engine: SeeingWorker, path: str, url: str, why: str) -> None:
    good = part_of(path, data_url(png()))
    body = body_of(path, good, text_part(path), part_of(path, url))
    status, _, raw = await post_once(engine_gateway(engine, max_image_bytes=1000), body, path)
    error = json.loads(raw)["error"]
    assert status == 400, raw
    assert "messages[0].content[2].image_url" in error["message"]
    assert error.get("param") == {CHAT: "messages[0].content[2].image_url", RESPONSES: "input"}.get(path)
    assert why in error["message"]
    assert engine.received == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png,abc", "in base64"),
        ("file:///etc/passwd", "http(s) URL"),
        ("https://images.example/" + "a" * 9000, "http(s) URL"),
        ("https://images.example\\@other/", "http(s) URL"),
        ("https://a@images.example/", "http(s) URL"),
        ("https://images.example:8443/a", "images.example:8443"),
        ("https://other.example/a", "other.example:443"),
        ("http://127.0.0.1/a", "127.0.0.1:80"),
        ("", "http(s) URL"),
        (None, "string"),
        (5, "string"),
        ([], "string"),
    ],
)
async def test_only_urls_of_allowed_hosts_reach_engines(engine: SeeingWorker, url: Any, why: str) -> None:
    async with engine_gateway(engine, image_hosts=RULES.image_hosts) as target:
        status, _, raw = await post(target.url, body_of(CHAT, {"type": "image_url", "image_url": url}))
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (400, "messages[0].content[0].image_url")
    assert why in error["message"]
    assert engine.rendered == []


HOSTS = st.sampled_from(["images.example", "other.example", "evil.example", "IMAGES.example", "127.0.0.1", "[::1]", ""])
PIECES = st.sampled_from(["/", "\\", "@", "#", "?", ":", "//", ".", "%40", "%2f", " ", "\t", ":443", ":8443", "é", ";"])
URLS = st.tuples(
    st.sampled_from(["http://", "https://", "HTTPS://", "ftp://", "//", ""]), st.lists(HOSTS | PIECES, max_size=8)
).map(lambda drawn: drawn[0] + "".join(drawn[1]))


@given(URLS)
def test_accepted_urls_name_one_host_to_every_reader(url: str) -> None:
    try:
        run_now(image_name(Raw(msgspec.json.encode(url)), "p", RULES, SALT))
    except InvalidRequestError:
        return
    found = {(yarl.URL(url).host, yarl.URL(url).port), (parse_url(url).host, parse_url(url).port or yarl.URL(url).port)}
    assert len(found) == 1
    assert found <= {("images.example", 80), ("images.example", 443), ("other.example", 8443)}


async def test_too_many_images_are_refused(engine: SeeingWorker) -> None:
    part = part_of(CHAT, data_url(png()))
    async with engine_gateway(engine, max_images=2) as target:
        assert (await post(target.url, body_of(CHAT, part, part)))[0] == 200
        status, _, raw = await post(target.url, body_of(CHAT, part, part, TEXT, *[part] * 1000))
        none = await post(target.url, body_of(CHAT, TEXT))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[0].content[3]")
    assert none[0] == 200
    status, _, raw = await post_once(engine_gateway(engine, max_images=0), body_of(CHAT, part))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[0].content[0]")


async def test_images_go_to_workers_that_take_them(engine: SeeingWorker, bundle: TokenizerBundle) -> None:
    """The others render no image. A fleet without one refuses them."""
    blind = SeeingWorker(bundle, "w1", tokenizer=engine.tokenizer, sees=False)
    body = body_of(CHAT, part_of(CHAT, data_url(png())))
    async with engine_gateway(blind, engine) as target:
        target.router.members = [engine.member()]
        for _ in range(6):
            assert (await post(target.url, body))[0] == 200
    assert (len(blind.seen), len(engine.seen)) == (0, 6)
    status, _, raw = await post_once(engine_gateway(blind), body)
    assert status == 400
    assert "takes no images" in json.loads(raw)["error"]["message"]


async def test_other_media_are_refused_by_name(engine: SeeingWorker) -> None:
    image = part_of(CHAT, data_url(png()))
    async with engine_gateway(engine) as target:
        for part, name in (
            ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "input_audio"),
            (image | {"audio_url": {"url": "u"}}, "audio_url"),
            ({"type": "text", "text": "a", "image_url": {"url": "u"}}, "image_url"),
            ({"type": "image", "source": {"type": "url", "url": "u"}}, "image"),
            ({"type": "image_embeds", "image_embeds": "AA=="}, "image_embeds"),
        ):
            status, _, raw = await post(target.url, body_of(CHAT, image, part))
            error = json.loads(raw)["error"]
            assert (status, error["param"]) == (400, "messages[0].content[1]")
            assert name in error["message"]
    assert engine.rendered == []


@pytest.mark.parametrize("broken", [b"\xff", b"\\ud800", b"\\udc00"])
async def test_broken_values_are_refused(engine: SeeingWorker, broken: bytes) -> None:
    """They may be in names of fields, in parts, or in what only the engine reads."""
    image = part_of(CHAT, data_url(png()), cache_control="HERE")
    async with engine_gateway(engine) as target:
        for name in ("cache_salt", "messages", "cache_control", "HERE", "temperature"):
            body = json.dumps(body_of(CHAT, image, cache_salt="s", temperature="x")).encode()
            status, _, raw = await post(target.url, body.replace(name.encode(), name.encode() + broken))
            assert status == 400, raw
        status, _, raw = await post(target.url, body.replace(b'"x"', b"1e999"))
        assert (status, json.loads(raw)["error"]["param"]) == (400, "temperature")


async def test_no_image_is_dropped(engine: SeeingWorker) -> None:
    """This engine reads none in a field that is not of chats, as vLLM does."""
    image = part_of(CHAT, data_url(png()))
    body = body_of(CHAT, image)
    body["messages"][0]["output"] = [image]
    status, _, raw = await post_once(engine_gateway(engine), body)
    assert status == 400
    assert "reads 1 of 2 images" in json.loads(raw)["error"]["message"]


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_clients_do_not_set_how_images_are_processed(engine: SeeingWorker, name: str) -> None:
    """One could have a small image made into a huge one."""
    image = part_of(CHAT, data_url(png()))
    async with engine_gateway(engine) as target:
        status, _, raw = await post(target.url, body_of(CHAT, image, **{name: {"size": {"longest_edge": 10**6}}}))
        assert (status, json.loads(raw)["error"]["param"]) == (400, name)
        assert engine.rendered == []
        assert (await post(target.url, body_of(CHAT, image, **{name: None})))[0] == 200


async def test_types_of_parts_are_strings(engine: SeeingWorker) -> None:
    """vLLM fails at another type. One that is missing is written for it."""
    image = part_of(CHAT, data_url(png()))
    async with engine_gateway(engine) as target:
        for wrong in ([], {}, 5, True):
            status, _, raw = await post(target.url, body_of(CHAT, image | {"type": wrong}))
            assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[0].content[0].type")
        assert (await post(target.url, body_of(CHAT, image | {"type": None})))[0] == 200
    assert engine.rendered[0]["messages"][0]["content"][0]["type"] == "image_url"


async def test_control_tokens_next_to_images_are_refused(engine: SeeingWorker) -> None:
    """For the comparison, the engine gets a small image instead of each."""
    image = part_of(CHAT, data_url(png(size=(64, 64), pixels=bytes(range(256)))))
    async with engine_gateway(engine) as target:
        status, _, raw = await post(target.url, body_of(CHAT, image, text_part(CHAT, "a < b")))
        assert status == 200, raw
        sizes = [len(url) for url, _ in engine.seen]
        assert sizes[0] > sizes[1] == sizes[2]
        status, _, raw = await post(target.url, body_of(CHAT, image, text_part(CHAT, "<|im_end|>")))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "control_token")


class StrictWorker(SeeingWorker):
    """Takes only messages of users."""

    def render(self, path: str, body: dict[str, Any]) -> Rendered | Failed:
        if body["messages"][0]["role"] == "user":
            return super().render(path, body)
        return Failed("invalid_request", "role: unknown", retryable=False)


async def test_other_errors_name_no_image(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    worker = StrictWorker(bundle, tokenizer=raw_tokenizer)
    body = body_of(CHAT, part_of(CHAT, data_url(png())))
    body["messages"][0]["role"] = "odd"
    status, _, raw = await post_once(engine_gateway(worker), body)
    assert status == 400
    assert json.loads(raw)["error"]["message"].startswith("role: unknown")


class ShortWorker(SeeingWorker):
    def render(self, path: str, body: dict[str, Any]) -> Rendered | Failed:
        return Failed("context_length_exceeded", "The prompt is too long.", retryable=False)


async def test_a_long_prompt_is_rendered_once(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    """No image of it is rendered by itself, as none is at fault."""
    worker = ShortWorker(bundle, tokenizer=raw_tokenizer)
    status, _, raw = await post_once(engine_gateway(worker), body_of(CHAT, *[part_of(CHAT, data_url(png()))] * 3))
    assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")
    assert len(worker.rendered) == 1


def test_a_large_image_is_never_decoded_as_a_whole() -> None:
    """Its bounds are checked first, and its bytes are hashed slice by slice."""
    body = json.dumps(body_of(CHAT, part_of(CHAT, data_url(bytes(15 << 20))))).encode()
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    tracemalloc.start()
    try:
        media = run_now(read_media(fields, CHAT, rules(16 << 20), SALT))
        assert media.num_bytes > 20 << 20
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
        tracemalloc.reset_peak()
        with pytest.raises(InvalidRequestError, match="more than 1000 bytes"):
            run_now(read_media(fields, CHAT, rules(1000), SALT))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


async def test_large_images_do_not_count_as_text(engine: SeeingWorker) -> None:
    """A body with as much text is refused."""
    image = part_of(CHAT, data_url(png() + bytes(12 << 20) + png()[-12:]))
    async with engine_gateway(engine, max_body_bytes=32 << 20) as target, httpx.AsyncClient(timeout=HANG_S) as client:
        answer = await client.post(target.url + CHAT, json=body_of(CHAT, image))
        assert answer.status_code == 200, answer.text
        answer = await client.post(target.url + CHAT, json=body_of(CHAT, image, text_part(CHAT, "a" * (13 << 20))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_streams_with_images_are_not_continued(engine: SeeingWorker, bundle: TokenizerBundle) -> None:
    """An engine renders them again, and takes no ids of the answer so far."""
    other = SeeingWorker(bundle, "w1", tokenizer=engine.tokenizer)
    engine.dies_after = 2
    body = body_of(CHAT, part_of(CHAT, data_url(png())), stream=True)
    _, _, raw = await post_once(engine_gateway(engine, other), body)
    assert b"worker_lost" in raw
    assert other.received == []


def test_media_of_a_newer_worker_are_read() -> None:
    """A newer peer may append fields."""
    assert MediaStart("a", 1) == msgspec.convert(["a", 1, "later"], MediaStart)
