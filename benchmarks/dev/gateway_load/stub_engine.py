"""The half of the stub that an adapter sees: vLLM's token API and its cache events, without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq
from tokenizers import Tokenizer

from worker.wire import TokenizerBundle

BLOCK_SIZE: Final = 32
_CHOICE: Final = (
    b'data: {"request_id":"generate-tokens-x","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":%b,"stop_reason":null,"token_ids":[%b],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":null}]}\n\n'
)
_USAGE: Final = (
    b'data: {"request_id":"generate-tokens-x","usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":0}},"output_mode":"tokens","choices":[]}\n\ndata: [DONE]\n\n'
)
END: Final = _CHOICE % (b'"length"', b"") + _USAGE
_METRICS: Final = """process_start_time_seconds 1.0
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100000"} 1.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 20000.0
vllm:request_prefill_time_seconds_sum{engine="0"} 1.0
"""


def token_event(token_id: int) -> bytes:
    """Return one token as vLLM streams it."""
    return _CHOICE % (b"null", b"%d" % token_id)


class EngineHalf:
    """State of the engine: names of blocks, and the socket of their events."""

    def __init__(self, bundle: TokenizerBundle, events: str | None) -> None:
        """Connect to `events`, as vLLM does; None: publish none."""
        self._tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        self._models = {"id": bundle.model, "root": "", "parent": None, "max_model_len": bundle.max_model_len}
        self._events = events
        self._num_blocks = 0
        self._num_batches = 0
        self._pending: list[dict[str, Any]] = []
        self._socket: zmq.Socket[bytes] | None = None
        if events is not None:
            self._socket = zmq.Context.instance().socket(zmq.PUB)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(events)

    def answer(self, path: bytes, body: bytes) -> bytes | None:
        """Return the JSON or text of a call that is no generation; None for an unknown path."""
        match path:
            case b"/version":
                return b'{"version":"0.32.0"}'
            case b"/v1/models":
                return json.dumps({"object": "list", "data": [self._models]}).encode()
            case b"/metrics":
                return _METRICS.encode()
            case b"/kv_event_sources":
                source = {"publisher": "zmq", "endpoint": self._events, "replay_endpoint": None, "topic": ""}
                return json.dumps({} if self._events is None else {"0": source}).encode()
            case b"/tokenize":
                ids = self._tokenizer.encode(json.loads(body)["prompt"], add_special_tokens=False).ids
                return json.dumps({"tokens": ids, "count": len(ids)}).encode()
            case b"/health":
                return b""
        return None

    def store_prompt(self, token_ids: Sequence[int], salt: str) -> int:
        """Note the full blocks of a prompt, and return the name of the last one."""
        num_blocks = len(token_ids) // BLOCK_SIZE
        extra_keys: list[list[str] | None] = [[salt], *[None] * (num_blocks - 1)]
        return self._store(None, token_ids[: num_blocks * BLOCK_SIZE], extra_keys[:num_blocks])

    def store_output(self, parent: int, token_id: int) -> int:
        """Note one block of output, and return its name."""
        return self._store(parent, [token_id] * BLOCK_SIZE, [None])

    def publish(self) -> None:
        """Send what was noted as one batch, as a step of the engine does."""
        events, self._pending = self._pending, []
        if self._socket is not None and events:
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            self._socket.send_multipart((b"", self._num_batches.to_bytes(8, "big"), payload))
            self._num_batches += 1

    def _store(self, parent: int | None, token_ids: Sequence[int], extra_keys: list[list[str] | None]) -> int:
        names = range(self._num_blocks + 1, self._num_blocks + 1 + len(extra_keys))
        self._num_blocks += len(extra_keys)
        if names and self._socket is not None:
            self._pending.append(
                {
                    "type": "BlockStored",
                    "block_hashes": list(names),
                    "parent_block_hash": parent,
                    "token_ids": token_ids,
                    "block_size": BLOCK_SIZE,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": extra_keys,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
        return self._num_blocks
