# ruff: noqa: RUF001 (DeepSeek's markers have a wide bar)
"""Texts of families give the names, arguments, content and reasoning that vLLM's own parsers give."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.text.formats import FORMATS
from server.text.formats.reasoning import THOUGHT_FORMATS
from server.text.output_parser import ChoiceMessage, OutputRules, ReasoningStart
from tests.vllm.engines import ENVIRONMENT, INSTALLED

Call = tuple[str, dict[str, Any]]
Answer = tuple[str, str, list[Call]]
"""Reasoning, content and calls."""
PARSE: Final = """
import json, sys
import vllm.platforms
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}

def parse(job):
    raw = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(job["tokens"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    kind = ParserManager.get_parser(job["tool"], job["reasoning"], enable_auto_tools=True)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Hi"}], tools=job["tools"])
    ids = tokenizer.encode(job["text"], add_special_tokens=False)
    kwargs = {"thinking": job["thinks"], "enable_thinking": job["thinks"]}
    parser = kind(tokenizer, request.tools, chat_template_kwargs=kwargs)
    reasoning, content, calls = parser.parse(job["text"], parser.adjust_request(request), True, ids)
    return reasoning or "", content or "", [(call.name, json.loads(call.arguments)) for call in calls or ()]

for job in json.load(sys.stdin):
    try:
        answer = parse(job)
    except Exception as error:
        answer = [repr(error), "", []]
    print("answer", json.dumps(answer))
"""
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "options": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
SCHEMAS: Final = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}}}
TOOLS: Final = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
CITY: Final[Call] = ("get_weather", {"city": "Rome"})
NESTED: Final[Call] = ("get_weather", {"options": {"a": [1, {"b": None}], "c": "x, y"}, "tags": ["p", "q r"]})
UNICODE: Final[Call] = ("get_weather", {"city": 'Köln "Süd"\n日本 🎉 <b> {x}'})
SCALARS: Final[Call] = ("get_weather", {"days": -3, "ratio": 0.5, "exact": True, "unit": None, "city": "7"})
NOW: Final[Call] = ("now", {})
ANSWERS: Final[dict[str, Answer]] = {
    "one call": ("", "", [CITY]),
    "parallel calls": ("", "", [CITY, NOW, SCALARS]),
    "reasoning": ("Let me see.\nWell.", "", [CITY]),
    "reasoning and text": ("Let me see.", "I look it up.", [CITY, CITY]),
    "reasoning and no call": ("Let me see.", "It is\n\nsunny.", []),
    "text": ("", "I look it up.", [CITY]),
    "no call": ("", "It is sunny, x < 3 {a} [b].", []),
    "nested": ("", "", [NESTED]),
    "unicode": ("", "", [UNICODE]),
    "no arguments": ("", "", [NOW]),
    "scalars": ("", "", [SCALARS]),
}


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def think(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n"


def objects(opening: str, closing: str, between: str, arguments: str = "arguments") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return between.join(f"{opening}{dumped({'name': name, arguments: given})}{closing}" for name, given in calls)

    return write


def listed(opening: str, closing: str) -> Callable[[list[Call]], str]:
    return lambda calls: f"{opening}{dumped([{'name': n, 'arguments': given} for n, given in calls])}{closing}"


def named(
    before: str, after: str, end: str, section: tuple[str, str] = ("", ""), between: str = ""
) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        written = (
            before.format(name, number) + after.format(name, number) + dumped(given) + end
            for number, (name, given) in enumerate(calls)
        )
        return section[0] + between.join(written) + section[1]

    return write


def qwen(opening: str = "<tool_call>", closing: str = "</tool_call>", line: str = "\n") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return line.join(
            f"{opening}{line}<function={name}>{line}"
            + "".join(f"<parameter={k}>{line}{text_of(v)}{line}</parameter>{line}" for k, v in given.items())
            + f"</function>{line}{closing}"
            for name, given in calls
        )

    return write


def invokes(opening: str, closing: str) -> Callable[[list[Call]], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        tags = "".join(f'<parameter name="{k}">{text_of(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">\n{tags}</invoke>\n'

    return lambda calls: f"{opening}\n{''.join(call(*each) for each in calls)}{closing}"


def glm(line: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return line.join(
            f"<tool_call>{name}{line}"
            + "".join(
                f"<arg_key>{k}</arg_key>{line}<arg_value>{text_of(v)}</arg_value>{line}" for k, v in given.items()
            )
            + "</tool_call>"
            for name, given in calls
        )

    return write


def python(opening: str, closing: str, between: str = ", ") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return (
            opening
            + between.join(f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls)
            + closing
        )

    return write


@dataclass(frozen=True)
class Family:
    """How a family writes an answer, and the parsers that read it."""

    tool_parser: str
    reasoning_parser: str | None
    calls: Callable[[list[Call]], str]
    between: str = ""
    """A text between content and calls."""
    thoughts: Callable[[str], str] | None = None
    style: str = "think"
    starts: ReasoningStart = "maybe"
    tools: str = ""
    """Headstart's name of the format; by default the family's."""

    def write(self, answer: Answer) -> str:
        reasoning, content, calls = answer
        before = self.thoughts(reasoning) if self.thoughts and reasoning else ""
        written = self.calls(calls) if calls else ""
        return before + content + (self.between if content and calls else "") + written


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FAMILIES: Final[dict[str, Family]] = {
    "hermes": Family("hermes", "qwen3", objects("<tool_call>\n", "\n</tool_call>", "\n"), "\n", think),
    "qwen3_coder": Family("qwen3_coder", "qwen3", qwen(), "\n", think),
    "llama": Family("llama3_json", None, objects("", "", "; ", "parameters")),
    "llama4": Family("llama4_pythonic", None, python("<|python_start|>[", "]<|python_end|>"), tools="llama"),
    "pythonic": Family("pythonic", None, python("[", "]")),
    "mistral": Family("mistral", "mistral", listed("[TOOL_CALLS]", ""), "", lambda t: f"[THINK]{t}[/THINK]", "mistral"),
    "mistral_v11": Family(
        "mistral", "mistral", named("[TOOL_CALLS]{}", "[ARGS]", ""), "", lambda t: f"[THINK]{t}[/THINK]", "mistral"
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "deepseek_v3",
        named(f"{CALL}function{SEP}{{}}", "\n```json\n", f"\n```{CALL_END}", (BEGIN, END), "\n"),
        "\n\n",
        think,
    ),
    "glm45": Family("glm45", "glm45", glm("\n"), "\n", lambda t: f"<think>{t}</think>\n"),
    "glm47": Family("glm47", "glm47", glm(""), "", lambda t: f"{t}</think>"),
    "minimax_m2": Family(
        "minimax_m2",
        "minimax_m2",
        invokes("<minimax:tool_call>", "</minimax:tool_call>"),
        "\n",
        lambda t: f"{t}\n</think>\n\n",
    ),
    "granite3": Family(
        "granite",
        "granite",
        listed("<|tool_call|>", ""),
        "",
        lambda t: f"Here is my thought process: {t} Here is my response: ",
        "granite",
    ),
    "phi4_mini": Family("phi4_mini_json", None, listed("functools", "")),
}
NO_LIST: Final = "vLLM reads a list of calls only with the tokenizers of Mistral's own package"
DIFFERENCES: Final[Mapping[tuple[str, str], str]] = {
    ("llama", "text"): "vLLM drops the text, and takes any object in an answer for a call",
    ("llama4", "text"): "vLLM takes an answer that begins with text for no call",
    **{("mistral", label): NO_LIST for label, answer in ANSWERS.items() if answer[2]},
    ("phi4_mini", "text"): "vLLM drops the text",
    ("phi4_mini", "nested"): "vLLM ends the list at the first bracket that closes",
}
"""By family and answer: why ours differs."""


def starts(family: Family, text: str) -> ReasoningStart:
    thoughts = THOUGHT_FORMATS[family.style]
    inside = any(end in text for end in thoughts.ends) and not any(start in text for start in thoughts.starts)
    return "inside" if inside else "maybe" if family.thoughts else "none"


def ours(name: str, family: Family, text: str, schemas: Mapping[str, Any] = SCHEMAS) -> Answer:
    rules = OutputRules(
        reasoning=starts(family, text),
        thoughts=THOUGHT_FORMATS[family.style],
        tools=FORMATS[family.tools or name],
        tool_names=frozenset(schemas),
        schemas=schemas,
    )
    message = ChoiceMessage(rules).whole(text)
    calls = [each["function"] for each in message.get("tool_calls", ())]
    found = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return message.get("reasoning_content", ""), message["content"] or "", found


def job(name: str, text: str, *, thinks: bool, tools: Sequence[Any] = TOOLS) -> dict[str, Any]:
    family, thoughts = FAMILIES[name], THOUGHT_FORMATS[FAMILIES[name].style]
    markers = {*FORMATS[family.tools or name].markers, *(thoughts.markers if family.thoughts else ())}
    return {
        "tool": family.tool_parser,
        "reasoning": family.reasoning_parser if thinks or name != "minimax_m2" else None,
        "text": text,
        "tools": tools,
        "thinks": thinks,
        "tokens": sorted(each for each in markers if each[:1] + each[-1:] in ("<>", "[]")),
    }


def theirs(jobs: Sequence[dict[str, Any]]) -> list[Answer]:
    command = [INSTALLED / "bin" / "python", "-c", PARSE]
    given = json.dumps(jobs)
    output = subprocess.run(command, env=ENVIRONMENT, input=given, capture_output=True, text=True, check=True).stdout
    answers = [json.loads(line.removeprefix("answer ")) for line in output.splitlines() if line.startswith("answer ")]
    return [(reasoning, content, [(call, given) for call, given in calls]) for reasoning, content, calls in answers]


def test_calls_and_reasoning_are_those_of_vllm() -> None:
    """White space at either end of content and reasoning apart, which formats drop or keep as they like."""
    texts = {
        (name, label): family.write(answer)
        for name, family in FAMILIES.items()
        for label, answer in ANSWERS.items()
        if family.thoughts or not answer[0]
    }
    differing = {}
    answers = theirs([job(name, text, thinks=bool(ANSWERS[label][0])) for (name, label), text in texts.items()])
    for key, answer in zip(texts, answers, strict=True):
        found = ours(key[0], FAMILIES[key[0]], texts[key])
        if [part.strip() for part in found[:2]] != [part.strip() for part in answer[:2]] or found[2] != answer[2]:
            differing[key] = (texts[key], found, answer)
    for key, each in differing.items():
        print(key, *each, sep="\n    ")
    assert differing.keys() == DIFFERENCES.keys()


KINDS: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "list": {"type": "array"},
    "number or null": {"type": ["number", "null"]},
    "text or null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "number or text": {"oneOf": [{"type": "number"}, {"type": "string"}]},
    "enum": {"enum": ["a", 1]},
    "alias": {"type": "int"},
    "any": {},
}
VALUES: Final = (
    "7",
    "-3",
    "0.5",
    "1e3",
    "true",
    "True",
    "0",
    "1",
    "null",
    "None",
    '"a"',
    "a b",
    '{"a": [1]}',
    "[1, 2]",
    "",
)
NO_TEXT: Final = ("integer", "number", "object", "list", "number or null", "alias")
PYTHON_WORDS: Final = {
    *((kind, word) for kind in NO_TEXT for word in ("True", "None")),
    ("boolean", "None"),
    ("text or null", "None"),
}
"""Templates write Python's words for values. vLLM makes strings of these, which the schema refuses."""


def test_types_of_arguments_are_those_of_vllm() -> None:
    """Compare each kind with each value, in families whose arguments are text."""
    names = {f"p{number}": pair for number, pair in enumerate((kind, value) for kind in KINDS for value in VALUES)}
    schema = {"type": "object", "properties": {name: KINDS[kind] for name, (kind, _) in names.items()}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = ("f", {name: value for name, (_, value) in names.items()})
    families = ("qwen3_coder", "glm47", "minimax_m2")
    texts = [FAMILIES[name].calls([call]) for name in families]
    jobs = [job(name, text, thinks=False, tools=tools) for name, text in zip(families, texts, strict=True)]
    differing = {}
    for family, text, (_, _, [(_, given)]) in zip(families, texts, theirs(jobs), strict=True):
        [(_, found)] = ours(family, FAMILIES[family], text, {"f": schema})[2]
        for name, pair in names.items():
            pairs = found.get(name), given.get(name)
            if pairs[0] != pairs[1] or isinstance(pairs[0], bool) != isinstance(pairs[1], bool):
                differing.setdefault(pair, {})[family] = pairs
    for pair, each in differing.items():
        print(pair, each)
    assert differing.keys() == PYTHON_WORDS
