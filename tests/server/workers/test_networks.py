"""Which URLs of workers are dialled: one that passes the check makes no library raise."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.workers.client import GenerateStream, WorkerClient
from server.workers.connection import WorkerAddress, WorkerLost
from server.workers.networks import WorkerNetworks, check_target, is_worker_url, resolve
from worker.wire import ChoiceState, GenerateRequest, SamplingParams

LABEL = st.text("ab0-_.", max_size=70)
HOST = st.one_of(
    st.lists(LABEL, max_size=5).map(".".join),
    st.from_regex(r"\[[0-9a-f:.]{0,20}\]", fullmatch=True),
    st.ip_addresses().map(lambda ip: f"[{ip}]" if ip.version == 6 else str(ip)),
    st.text(max_size=20),
)
PORT = st.one_of(st.just(""), st.integers(-1, 10**6).map(lambda port: f":{port}"), st.text(max_size=6))
REQUEST = GenerateRequest("r", "g", "e", bytes(16), [1], (ChoiceState(0, 1),), SamplingParams(max_tokens=1))


@given(host=HOST, port=PORT)
@example(host="a..b", port=":80")
@example(host="a" * 64, port="")
@example(host="[1:2:3]", port=":80")
@example(host="h", port=":99999")
@example(host="h", port=":0")
def test_an_accepted_url_can_be_parsed(host: str, port: str) -> None:
    url = f"http://{host}{port}"
    if WorkerNetworks().reject_reason(url) is None:
        address = WorkerAddress(url)
        assert address.host
        assert 0 < address.port < 65536
        address.host.encode("idna")


@pytest.mark.parametrize(
    "url",
    ["http://a..b:80", f"http://{'a' * 64}:80", "http://h:99999", "http://h:0", "http://[1:2:3]:80", "http://.:80",
     "http://[::1", "http://", "http://-:80/x", "http://h:8\u0661"],
)  # fmt: skip
async def test_an_unusable_url_is_refused_and_loses_only_its_worker(url: str) -> None:
    assert not is_worker_url(url)
    assert WorkerNetworks().reject_reason(url) is not None
    with pytest.raises(ValueError, match="--workers"):
        check_target(url)
    client = WorkerClient()
    try:
        with pytest.raises(WorkerLost):
            await client.bundle(url)
        with pytest.raises(WorkerLost):
            async with GenerateStream(client, url, REQUEST):
                pass
    finally:
        client.close()


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\udc80"])
async def test_an_invalid_name_does_not_resolve(host: str) -> None:
    with pytest.raises(OSError, match="is no address"):
        await resolve(host, 80)
