"""One model, ready to turn requests into tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from cache.hashing import Namespace
from cache.types import BlockHash
from server.config import GatewayConfig
from server.text.chat_template import ChatTemplate
from server.text.formats import FORMATS, format_of
from server.text.formats.base import ToolFormat
from server.text.output_parser import THINK
from server.text.tokenizer import Tokenizer, TokenizerError
from worker.wire import TokenizerBundle

MAX_ROOTS: Final = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model, ready to turn requests into tokens."""

    name: str
    bundle: TokenizerBundle
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_format: ToolFormat
    """The way it writes tool calls."""
    thinks: bool
    """True if it may think in tags before it answers."""
    created: int
    fingerprint: str
    """The namespace's, as its workers announce it."""
    root: Callable[[bytes], BlockHash]
    """Return a tenant's root of the hash chain by its salt, from a cache: it takes a few microseconds to make."""
    keeps_client_lines: bool = False
    """True: its prompts keep the lines that agents write for other servers."""
    adapter: str = ""
    """The LoRA adapter of its engines that answers; empty: the model itself."""

    @property
    def max_model_len(self) -> int:
        return self.bundle.max_model_len

    def with_adapter(self, adapter: str) -> ServedModel:
        """Return this model with a LoRA adapter, whose blocks share no prefix with the model's."""
        return replace(self, adapter=adapter, root=_cached_root(namespace_of(self.bundle), adapter))

    @property
    def prompt_bytes(self) -> int | None:
        """Return the most bytes a prompt that fits can have; None when there is no bound."""
        bound = self.tokenizer.bound
        return None if bound is None or not bound.counts_space else bound.token_bytes * self.max_model_len


def namespace_of(bundle: TokenizerBundle) -> Namespace:
    return Namespace(
        model=bundle.model, revision=bundle.revision, tokenizer=bundle.fingerprint, block_size=bundle.block_size
    )


def build_model(bundle: TokenizerBundle, executor: ThreadPoolExecutor, config: GatewayConfig) -> ServedModel:
    """Parse the bundle's files, which takes tenths of a second: run it in a thread.

    Raises TokenizerError or TemplateError.
    """
    for field_name in ("block_size", "max_model_len", "vocab_size"):
        if getattr(bundle, field_name) < 1:
            raise TokenizerError(f"the bundle's {field_name} is {getattr(bundle, field_name)}")
    template = None
    if bundle.chat_template is not None:
        template = ChatTemplate(bundle.chat_template, bos_token=bundle.bos_token, eos_token=bundle.eos_token)
    tokenizer = Tokenizer(bundle, executor, "" if template is None else template.plain_conversation())
    if template is not None and not config.control_tokens_in_content:
        template.keep_as_text(tokenizer.control_tokens)
    namespace = namespace_of(bundle)
    return ServedModel(
        name=bundle.model,
        fingerprint=namespace.fingerprint,
        bundle=bundle,
        tokenizer=tokenizer,
        template=template,
        tool_format=_tool_format(config.tool_parser, bundle.chat_template or ""),
        thinks=THINK in (bundle.chat_template or "") if config.reasoning is None else config.reasoning,
        created=int(time.time()),
        root=_cached_root(namespace),
        keeps_client_lines=config.keep_client_lines,
    )


def _tool_format(name: str | None, template: str) -> ToolFormat:
    return format_of(template) or FORMATS["hermes"] if name is None else FORMATS[name]


def _cached_root(namespace: Namespace, adapter: str = "") -> Callable[[bytes], BlockHash]:
    return lru_cache(MAX_ROOTS)(lambda salt: namespace.root(salt=salt, adapter=adapter))
