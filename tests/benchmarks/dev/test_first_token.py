"""The stages of a first token, the client that times it, and the bench over real processes."""

from __future__ import annotations

import json
import math
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import DEV_BENCHES
from benchmarks.dev.first_token_load.client import Client
from benchmarks.dev.first_token_load.marks import NAMES, MarkReader, Marks
from benchmarks.dev.first_token_load.stages import STAGES, walk

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"two"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens": 7}}\n\ndata: [DONE]\n\n',
)


def test_it_is_listed() -> None:
    assert "first-token" in DEV_BENCHES
    assert {moment for _, moment in STAGES} == {*NAMES, "received"}


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-1.0, 3.0))))
def test_stages_and_the_rest_add_up(marks: list[tuple[str, float]]) -> None:
    """Whatever is noted, also before the request and after its first token, no time counts twice."""
    found = walk(0.0, 2.0, marks)
    assert all(spent >= 0.0 for spent in found.stages.values())
    assert sum(found.stages.values()) + found.left_s == pytest.approx(2.0)
    assert found.left_s >= -1e-9
    if {name for name, at_s in marks if 0.0 <= at_s <= 2.0} != set(NAMES):
        assert len(found.stages) < len(STAGES)


def test_marks_are_read_while_they_are_written(tmp_path: Path) -> None:
    marks, reader = Marks(tmp_path / "marks"), MarkReader(tmp_path / "marks")
    assert list(reader.take()) == []
    marks.add(2)
    marks.add(0)
    assert [name for name, _ in reader.take()] == [NAMES[2], NAMES[0]]
    assert list(reader.take()) == []


def test_the_client_times_text_and_no_other_event() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer, args=(server,))
        thread.start()
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", "m")
        timed = client.ask("x", 2, stream=True)
        client.close()
        thread.join()
    assert timed.num_prompt_tokens == 7
    assert len(timed.gaps_s) <= 1
    assert timed.ttft_s > 0.0


def _answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(HEAD)
        for event in EVENTS:
            connection.sendall(b"%x\r\n%b\r\n" % (len(event), event))
        connection.sendall(b"0\r\n\r\n")


@pytest.mark.deep
def test_every_figure_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.dev import first_token
    from tests.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--rounds", "2", "--sizes", "30", "--threads", "1", "--json"]
    assert first_token.main([*options, "--num-blocks", "256"]) == 0
    said = capsys.readouterr().out
    figures = json.loads(said.splitlines()[-1])["figures"]
    assert figures.keys() >= {"warm_30_stream_here_p50_s", "cold_30_plain_here_p99_s", "warm_30_stream_step_p50_s"}
    assert all(math.isfinite(value) and value >= 0.0 for value in figures.values())
    assert all(stage in said for stage, _ in STAGES)
