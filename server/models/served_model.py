"""One model, ready to turn requests into tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

from cache.hashing import Namespace
from cache.records import WorkerMember
from cache.types import BlockHash
from server.config import GatewayConfig
from server.errors import InvalidRequestError
from server.models.recognition import formats
from server.schema.intent import Conversation
from server.text.chat_template import ChatTemplate
from server.text.formats.base import ToolFormat
from server.text.formats.reasoning import ThoughtFormat
from server.text.output_parser import THOUGHT_FIELDS
from server.text.tokenizer import Tokenizer, TokenizerError
from worker.wire import TokenizerBundle

MAX_ROOTS: Final = 10_000  # bounds the memory for salts of clients


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The abilities of a model's workers, together."""

    capabilities: frozenset[str] = frozenset()
    embedding_size: int = 0
    """The most numbers in an embedding of token ids; 0: none makes one."""
    aliases: frozenset[str] = frozenset()
    """Further names of the model, at its engines."""
    engine_paths: tuple[str, ...] = ()
    """The APIs of their engines."""
    max_model_len: int = 0
    """The longest context of a known worker, also of one that is lost; 0: none is known."""

    @staticmethod
    def of(members: Iterable[WorkerMember], max_model_len: int = 0) -> WorkerFacts:
        """`max_model_len`: the longest context among those that are lost."""
        members = list(members)
        capabilities = frozenset([name for member in members for name in member.capabilities])
        return WorkerFacts(
            capabilities,
            max([member.embedding_size for member in members], default=0),
            frozenset([name for member in members for name in member.aliases]),
            tuple(sorted([name for name in capabilities if name.startswith("/")])),
            max([max_model_len, *[member.max_model_len for member in members]]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model, ready to turn requests into tokens."""

    name: str
    bundle: TokenizerBundle
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_template: ChatTemplate | None
    """The template of conversations with tools, if it is another one."""
    template_kwargs: Mapping[str, Any]
    """The operator's switches of the template."""
    forced_kwargs: Mapping[str, Any]
    """Those that no request changes."""
    tool_format: ToolFormat | None
    """The way it writes tool calls; None: an unknown one."""
    thoughts: ThoughtFormat | None
    """The way it writes reasoning; None: it has none that is known."""
    created: int
    fingerprint: str
    """The namespace's, as its workers announce it."""
    root: Callable[[bytes], BlockHash]
    """Return a tenant's root of the hash chain by its salt, cached: making it takes a few microseconds."""
    keeps_client_lines: bool = False
    """True: its prompts keep the lines that agents write for other servers."""
    thought_fields: tuple[str, ...] = THOUGHT_FIELDS
    """The fields of a chat's answer that have its thoughts."""
    has_own_calls: bool = False
    """True: it was trained on its tool format."""
    facts: WorkerFacts = WorkerFacts()
    adapter: str = ""
    """The LoRA adapter that answers; empty: the model itself."""

    def template_for(self, conversation: Conversation) -> ChatTemplate | None:
        """Return the template of a conversation, as transformers chooses it."""
        return self.tool_template if conversation.tools and self.tool_template is not None else self.template

    @property
    def forced_format(self) -> ToolFormat | None:
        """The format that a grammar holds calls to; None: a JSON list."""
        return self.tool_format if self.has_own_calls else None

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len or self.bundle.max_model_len

    def check_readable(self, name: str) -> None:
        """Raises InvalidRequestError if only the engine can read the vocabulary. `name`: as the client calls it."""
        if self.tokenizer.is_engine_only:
            message = f"The model {name!r:.200} is not served by this route: only its engine can read its vocabulary."
            raise InvalidRequestError(message, param="model", code="unsupported_parameter")

    def with_adapter(self, adapter: str) -> ServedModel:
        """Return this model with a LoRA adapter, whose blocks share no prefix with the model's."""
        return replace(self, adapter=adapter, root=_cached_root(self.bundle.namespace, adapter))

    @property
    def prompt_bytes(self) -> int | None:
        """Return the most bytes of a prompt that fits; None without a bound."""
        bound = self.tokenizer.bound
        return None if bound is None or not bound.counts_space else bound.token_bytes * self.max_model_len


def build_model(bundle: TokenizerBundle, executor: ThreadPoolExecutor, config: GatewayConfig) -> ServedModel:
    """Parse the bundle's files, which takes tenths of a second: run it in a thread.

    Raises TokenizerError or TemplateError.
    """
    _check_sizes(bundle)
    defaults, forced = config.template_kwargs_of(bundle.model)
    defaults = {**json.loads(bundle.template_kwargs), **defaults}
    if (own := config.template_of(bundle.model)) is not None:
        bundle = replace(bundle, chat_template=own, tool_template=None)
    compiled = partial(
        ChatTemplate,
        bos_token=bundle.bos_token,
        eos_token=bundle.eos_token,
        defaults=defaults,
        forced=forced,
        is_strict=config.strict_template,
        sorts_schemas=config.sort_tool_schemas,
    )
    template = None if bundle.chat_template is None else compiled(bundle.chat_template)
    tool_template = None if bundle.tool_template is None else compiled(bundle.tool_template)
    tokenizer = Tokenizer(bundle, executor, "" if template is None else template.plain_conversation())
    for each in (template, tool_template):
        if each is not None and not config.control_tokens_in_content:
            each.keep_as_text(tokenizer.control_tokens)
    tool_format, thoughts, has_own_calls = formats(bundle, tokenizer, tool_template or template, config)
    return ServedModel(
        name=bundle.model,
        fingerprint=bundle.namespace.fingerprint,
        bundle=bundle,
        tokenizer=tokenizer,
        template=template,
        tool_template=tool_template,
        template_kwargs=defaults,
        forced_kwargs=forced,
        tool_format=tool_format,
        thoughts=thoughts,
        has_own_calls=has_own_calls,
        created=int(time.time()),
        root=_cached_root(bundle.namespace),
        keeps_client_lines=config.keep_client_lines,
        thought_fields=THOUGHT_FIELDS if config.reasoning_field_name is None else (config.reasoning_field_name,),
    )


def _check_sizes(bundle: TokenizerBundle) -> None:
    """Raises TokenizerError."""
    for name in ("block_size", "max_model_len", "vocab_size"):
        if getattr(bundle, name) < 1:
            raise TokenizerError(f"the bundle's {name} is {getattr(bundle, name)}")


def _cached_root(namespace: Namespace, adapter: str = "") -> Callable[[bytes], BlockHash]:
    return lru_cache(MAX_ROOTS)(lambda salt: namespace.root(salt=salt, adapter=adapter))
