"""Names of what a worker can and a request needs, compared as sets. A new feature adds a name here, and no field.

A name is a constant, the path of an engine's API, or that of a LoRA adapter. Such an API reads prompts and writes
answers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from worker.wire import Embed, EngineCall

TOKENS: Final = "tokens"
"""It takes prompts in token ids, and generates token ids."""
EMBEDDINGS: Final = "embeddings"
"""It takes prompts in token ids, and makes embeddings."""
IMAGES: Final = "images"
"""Its engine's chats take images."""
_ADAPTER: Final = "adapter:"
CHAT: Final = "/v1/chat/completions"
GENERATING: Final = frozenset({TOKENS, CHAT, "/v1/completions"})
"""Each of them makes text."""


def adapter_names(adapters: Iterable[str]) -> list[str]:
    """Return the capabilities of a worker with these LoRA adapters."""
    return [_ADAPTER + adapter for adapter in adapters]


def adapters_in(capabilities: Iterable[str]) -> list[str]:
    """Return the LoRA adapters among a worker's capabilities, or a request's needs."""
    return [name.removeprefix(_ADAPTER) for name in capabilities if name.startswith(_ADAPTER)]


def needs_of(call: EngineCall | None, embed: Embed | None, media: Sequence[object], adapter: str) -> frozenset[str]:
    """Return what a request with these fields needs."""
    task = call.path if call is not None else TOKENS if embed is None else EMBEDDINGS
    return frozenset([task, *([IMAGES] if media else []), *adapter_names([adapter] if adapter else [])])
