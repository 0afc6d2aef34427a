from __future__ import annotations

from tests.worker.scheduler.engine import generate
from worker.engine.protocol import RequestKey
from worker.http.streams import MAX_COALESCED_FRAMES, Stream
from worker.wire import FrameReader, Tokens


async def test_a_reader_that_lags_gets_every_frame_in_order() -> None:
    stream = Stream(RequestKey(0), generate([1]))
    frames = [Tokens(0, (number,)) for number in range(2 * MAX_COALESCED_FRAMES + 1)]
    for frame in frames:
        stream.put(frame)
    stream.close()
    reader, read = FrameReader(), []
    while data := await stream.take():
        read += reader.feed(data)
    assert read == frames
