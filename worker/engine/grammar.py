"""Structured output: the grammar of a choice masks the tokens that may come next.

Threads of their own compile grammars, under limits of size, work and time. The compiled form is cached, and every
choice gets a copy of its state. A grammar can fail its own request only.
Source: llguidance (Earley parser over derivative lexers), https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import Raw

from worker.common.json_schema import Path, check_embedded, check_factors, children, compiler_options, pointer
from worker.scheduler.request import ConstraintError
from worker.wire import GenerateRequest, Grammar, TokenizerBundle

_NUM_THREADS: Final = 2  # one grammar that takes long does not stop the others
_MAX_TEXT_BYTES: Final = 256 * 1024  # 8,700 levels at most: they fit into _STACK_BYTES
_STACK_BYTES: Final = 512 << 20
"""A thread's stack, of which only what is used takes memory. A level takes some 12 KiB, and 30 bytes of a schema."""
_PARSER_LIMITS: Final = LLParserLimits(
    max_grammar_size=500_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
)
_MAX_PROBES: Final = 200  # each compiles a schema
_MAX_SEARCH_S: Final = 1.0  # a hint is not worth more of a thread
_ROOT: Final = "x-root"

_WORDS: Final = (
    (r"Unimplemented keys: \[(.*)\].*", r"a grammar cannot hold \1"),
    (r"Unknown format: (.*)", r"a grammar cannot hold the format \1"),
    (r"Unsatisfiable schema: (.*)", r"no value fits: \1"),
    (r"(?:All options in|No options in) anyOf.*", "no value fits any of its options"),
    (r"Pointer '(.*)' does not exist", r"the reference #\1 points to nothing"),
    (r"Resource '(.*)' is not present.*", r"the reference \1 points to nothing in the schema"),
    (r"circular references with sibling keys.*", "a circular reference cannot be combined with other keywords"),
    (r"Invalid type: (.*)", r"\1 is no type"),
    (r"Expected (?:positive integer|u64) for '(\w+)'.*", r"\1 must be an integer from 0"),
    (r"Expected (\w+) for '([^']+)'.*", r"\2 must be: \1"),
    (r"recursion limit exceeded.*", "it nests too deeply"),
    (r"schema too large.*", "it has too many parts"),
    (r"Failed to generate regex for .*", "its bounds have too many digits"),
    (r"(?:fuel exhausted|too many|lexer|initial lexer).*", "it is too complex for a grammar"),
    (r"Unable to determine if regex is empty.*", "the pattern is too complex for a grammar"),
    (r"NoExtension\w*.*", "no text fits it"),
    (r"(?:InternalError|LexerTooComplex|ParserTooComplex)\W?.*", "it is too complex for a grammar"),
    (r"min/maxProperties only .*", "minProperties and maxProperties need all of properties in required"),
    (r"patternProperty regexes (.*) are not disjoint", r"the patterns \1 overlap"),
    (r"Value for 'multipleOf' has .*", "multipleOf has too many digits"),
)


class GrammarConstraint:
    """A `worker.scheduler.request.Constraint` over one matcher."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> object:
        """Return a bit mask of the vocabulary, int32 words, lowest bit first. Raise ConstraintError."""
        with _panics_are_errors():
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        return mask

    def allowed_along(self, draft_ids: Sequence[int]) -> list[object]:
        """Return the masks of `allowed` now and after each draft token, until the grammar ends."""
        masks = [self.allowed()]
        with _panics_are_errors():
            scout = GrammarConstraint(self._matcher.deep_copy())  # what goes wrong ahead is no error of the choice
        with suppress(ConstraintError):
            for draft_id in draft_ids:
                scout.advance(draft_id)
                if scout.finished:
                    break
                masks.append(scout.allowed())
        return masks

    def advance(self, token_id: int) -> None:
        with _panics_are_errors():
            self._matcher.consume_token(token_id)
        self._check()

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(in_words(_first_line(self._matcher.get_error())))


class GrammarCompiler:
    """The compiling threads and the cache of compiled grammars. Used from one event loop."""

    def __init__(
        self, bundle: TokenizerBundle, *, compile_timeout_s: float = 10.0, max_cached_bytes: int = 256 << 20
    ) -> None:
        """`max_cached_bytes` counts as `_estimate_bytes` does."""
        self._bundle = bundle
        self._compile_timeout_s = compile_timeout_s
        self._max_cached_bytes = max_cached_bytes
        self._threads = _threads_with_stacks()
        self._tokenizer: LLTokenizer | None = None
        self._control_texts: frozenset[str] = frozenset()
        """The texts of control tokens, plain and in JSON, both without backslashes. Known with the tokenizer."""
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._num_cached_bytes = 0

    async def constraints(self, request: GenerateRequest) -> dict[int, GrammarConstraint]:
        """Make one constraint per choice, advanced over the output of a resumed choice. Raise ConstraintError."""
        grammar = request.sampling.grammar
        if grammar is None:
            return {}
        prototype = await self._prototype(grammar)
        constraints = {}
        with _panics_are_errors():
            for choice in request.choices:
                matcher = prototype.deep_copy()
                if choice.output_ids and not matcher.consume_tokens(list(choice.output_ids)):
                    raise ConstraintError(f"output_ids: choice {choice.index} does not follow the grammar")
                constraints[choice.index] = GrammarConstraint(matcher)
        return constraints

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prototype(self, grammar: Grammar) -> LLMatcher:
        """Return the compiled grammar at its beginning. It is only copied, never advanced."""
        if (cached := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            return cached
        timeout_s = self._compile_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                matcher = await loop.run_in_executor(self._threads, self._compile, grammar)
        except TimeoutError:
            raise ConstraintError(f"{grammar.kind}: not compiled within {timeout_s:.0f} s; simplify it") from None
        self._cache(grammar, matcher)
        return matcher

    def _cache(self, grammar: Grammar, matcher: LLMatcher) -> None:
        if grammar not in self._compiled:  # two requests may have compiled it at once
            self._num_cached_bytes += _estimate_bytes(grammar)
        self._compiled[grammar] = matcher
        while self._num_cached_bytes > self._max_cached_bytes:
            dropped, _ = self._compiled.popitem(last=False)
            self._num_cached_bytes -= _estimate_bytes(dropped)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile on a thread of the pool."""
        if len(grammar.text.encode()) > _MAX_TEXT_BYTES:
            raise ConstraintError(f"{grammar.kind}: longer than {_MAX_TEXT_BYTES} bytes")
        try:
            source = to_llguidance(grammar)
        except Exception as error:  # the reader of GBNF raises plain Exception
            raise ConstraintError(f"{grammar.kind}: {_first_line(str(error))}") from error
        tokenizer, plain = self._get_tokenizer(), grammar.text.replace("\\", "")
        if any(text in plain for text in self._control_texts):
            source = _unforced(source)
        with _panics_are_errors():
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_PARSER_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # lazy parts of the lexer are built here, and may hit a limit
        if matcher.is_error():
            reason = in_words(_reason(matcher.get_error()))
            path = self._failing_path(grammar) if grammar.kind == "json_schema" else ""
            raise ConstraintError(f"{grammar.kind}: {path}{reason}")
        return matcher

    def _failing_path(self, grammar: Grammar) -> str:
        """Name the path in a schema that does not compile."""

        def error_of(text: str) -> str:
            source = to_llguidance(Grammar("json_schema", text))
            with _panics_are_errors():
                return str(LLMatcher.validate_grammar(source, self._get_tokenizer()))

        schema = json.loads(grammar.text)
        path = failing_path(schema, error_of) if isinstance(schema, dict) else ()
        return f"at {named(path)}: " if path else ""

    def _get_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                bundle, text = self._bundle, self._bundle.tokenizer_json.decode()
                fields = msgspec.json.decode(text, type=dict[str, Raw])  # a whole vocabulary would take 0.5 s
                tokens = msgspec.json.decode(fields.get("added_tokens", b"null")) or ()
                added = [each["content"] for each in tokens if each.get("special")]
                self._control_texts = frozenset([*added, *(json.dumps(each)[1:-1].replace("\\", "") for each in added)])
                self._tokenizer = LLTokenizer(text, n_vocab=bundle.vocab_size, eos_token=list(bundle.eos_token_ids))
            return self._tokenizer


def _threads_with_stacks() -> ThreadPoolExecutor:
    """Start the compiling threads. A schema recurses once for each reference in a row, and the compiler with it."""
    threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
    all_started = threading.Barrier(_NUM_THREADS + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_NUM_THREADS):
            threads.submit(all_started.wait)
    finally:
        threading.stack_size(before)
    all_started.wait()
    return threads


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Turn a panic of the library, a BaseException that would end the engine's thread, into a ConstraintError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConstraintError(f"the grammar library failed: {_first_line(str(error))}") from error


def _estimate_bytes(grammar: Grammar) -> int:
    """Estimate the memory of a compiled grammar, which the library does not report.

    Measured: 90 kB for a schema of 200 bytes, 30 to 260 bytes per byte of large ones.
    """
    return 100_000 + 256 * len(grammar.text)


def to_llguidance(grammar: Grammar) -> str:
    """Translate to llguidance's own form. Raise ValueError for malformed text."""
    match grammar.kind:
        case "json_object":
            return _from_schema({"type": "object"}, compact=grammar.compact)
        case "json_schema":
            return _from_schema(json.loads(grammar.text), compact=grammar.compact)
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice_rule(json.loads(grammar.text))))
        case "grammar":
            check_embedded(grammar.text)
            return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))
        case kind:
            raise ValueError(f"there is no kind {kind!r:.80}")


def _from_schema(schema: object, *, compact: bool) -> str:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    check_factors(schema)
    options: Any = compiler_options(compact=compact)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _unforced(source: str) -> str:
    """Return a grammar without the step that writes a fixed text as the tokenizer does, with its control tokens."""
    if source.startswith("{"):
        [part] = json.loads(source)["grammars"]
        source = part["lark_grammar"] or f"start: %json {json.dumps(part['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{source}'


def _choice_rule(options: object) -> str:
    if not isinstance(options, list) or not options or not all(isinstance(text, str) and text for text in options):
        raise ValueError("a list of texts that are not empty is needed")
    return "start: " + " | ".join(map(json.dumps, options))


def _reason(text: str) -> str:
    """Return an error's first line, and its reason where that stands further below."""
    reason = next((line for line in text.splitlines() if line.startswith("error: ")), "")
    return f"{_first_line(text)} {reason.removeprefix('error: ')}".rstrip()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def in_words(reason: str) -> str:
    """Return a reason of the library without the library's names."""
    for pattern, words in _WORDS:
        if (found := re.fullmatch(pattern, reason, re.DOTALL)) is not None:
            return found.expand(words)[:300]
    return reason


def failing_path(schema: dict[str, Any], error_of: Callable[[str], str]) -> Path:
    """Return the path of the innermost schema that does not compile by itself, where that is soon found.

    `error_of` compiles a schema's text, and returns what is wrong with it.
    """
    written = json.dumps(schema).replace('"$ref": "#', f'"$ref": "#/{_ROOT}')
    until_s = time.monotonic() + _MAX_SEARCH_S
    path: Path = ()
    node, num_probes = schema, 0
    while True:
        for step, child in children(node):
            if not isinstance(child, dict):
                continue
            num_probes += 1
            if num_probes > _MAX_PROBES or time.monotonic() > until_s:
                return path
            if error_of(f'{{"$ref": {json.dumps(pointer((_ROOT, *path, *step)))}, "{_ROOT}": {written}}}'):
                path, node = (*path, *step), child
                break
        else:
            return path


def named(path: Path) -> str:
    """Write a path as steps with dots, shortened."""
    return json.dumps(".".join(step[:64] for step in path[-16:]), ensure_ascii=True)[1:-1]
