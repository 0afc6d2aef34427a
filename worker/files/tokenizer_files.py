"""The files of a model that make its tokenizer: read by workers, and by adapters that load no model. Without torch.

Only an engine can read some vocabularies: tekken.json, ranks in tiktoken's format, and those with Python code. There
the engine renders prompts and writes answers, so the gateway does without the vocabulary. It still needs the control
tokens, to find them in clients' texts. A digest of the files shows whether two workers have the same vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from worker.common.command_line import reason
from worker.files.errors import CheckpointError
from worker.files.model_files import sampled_digest

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_TEXTS: Final = ("*.json", "*.jinja")
VOCABULARY_FILES: Final = ("tekken.json", "*.tiktoken", "tiktoken.model", "tokenizer.model*")
_CODE_FILES: Final = ("tokenization_*.py", "encoding_*.py")
ENGINE_FILES: Final = (*VOCABULARY_FILES, *_CODE_FILES)
"""Files of a repository that the digest needs."""
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


def vocab_size(folder: Path, tokenizer_json: bytes) -> int:
    """Return the size that a folder's configuration names, else that of its tokenizer. Raise CheckpointError."""
    config = _optional_json(folder / "config.json") or _optional_json(folder / "params.json")
    if isinstance(named := (config.get("text_config") or config).get("vocab_size"), int):
        return named
    if not tokenizer_json:
        raise CheckpointError(f"{folder} names no vocab_size in config.json or params.json")
    return int(Tokenizer.from_buffer(tokenizer_json).get_vocab_size())


def is_hub_id(source: str) -> bool:
    """Return whether it reads as `org/name` or `org/name@revision`, and not as a path."""
    return _HUB_ID.fullmatch(source) is not None and not source.startswith((".", "/"))


def download(source: str, *patterns: str) -> tuple[Path, str, str]:
    """Fetch a snapshot's texts, and files of `patterns`, from the Hugging Face hub. Return folder, name and commit.

    Raise CheckpointError.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=[*_TEXTS, *patterns]))
    except Exception as error:  # the hub client raises a wide range of errors, all of which mean the same here
        raise CheckpointError(f"{source!r} could not be fetched from the Hugging Face hub: {error}") from error
    return folder, name, folder.name


def tokenizer_folder(source: str, revision: str | None) -> tuple[Path, str]:
    """Return the folder of --tokenizer, and the revision of its model. Raise CheckpointError.

    A folder's revision is a digest of its configuration and of parts of its weights, which its engine has loaded.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path, revision or sampled_digest(path)
    if is_hub_id(source):
        folder, _, commit = download(
            source if revision is None or "@" in source else f"{source}@{revision}", *ENGINE_FILES
        )
        return folder, revision or commit
    raise CheckpointError(
        f"{source!r} is no folder here and no Hugging Face id such as 'org/name'; name one with --tokenizer"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raise CheckpointError."""
    value = _read(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read the JSON array of objects in a file. Raise CheckpointError."""
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CheckpointError(f"{path} holds no JSON array of objects")
    return value


def _read(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error


def fingerprint(tokenizer_json: bytes, *fields: object) -> str:
    """Digest the fields by which two tokenizers differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tokenizer_json, repr(fields).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def fields_of_folder(folder: Path, *, allow_engine_vocabulary: bool = False) -> dict[str, Any]:
    """Return the fields of a bundle that a folder determines, in the order in which `fingerprint` takes them.

    `allow_engine_vocabulary`: an engine serves the model, so a vocabulary that only it can read is enough.
    Raise CheckpointError.
    """
    file, vocabulary = folder / "tokenizer.json", None
    config = _optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older file: transformers reads the map too, and it wins
        config |= _optional_json(folder / "special_tokens_map.json")
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    if file.is_file():
        tokenizer_json = file.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the binding raises plain Exception for whatever is wrong with the file
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        bos_id = None if bos is None else tokenizer.token_to_id(bos)
        eos_id = None if eos is None else tokenizer.token_to_id(eos)
        add_bos = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    elif allow_engine_vocabulary and (vocabulary := engine_vocabulary(folder, config)) is not None:
        tokenizer_json, add_bos = b"", False
        eos_id = {token["content"]: token["id"] for token in json.loads(vocabulary)["added_tokens"]}.get(eos)
    else:
        raise CheckpointError(f"{folder} has no tokenizer.json; save a fast tokenizer there (save_pretrained does)")
    template, tool_template = _chat_templates(folder, config)
    return {
        "tokenizer_json": tokenizer_json,
        "chat_template": template,
        "bos_token": bos,
        "eos_token": eos,
        "eos_token_ids": _eos_token_ids(folder, eos_id),
        "add_bos": add_bos,
        **({} if vocabulary is None else {"engine_vocabulary": vocabulary}),
        **({} if tool_template is None else {"tool_template": tool_template}),
    }


def _eos_token_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """Take generation_config.json, else config.json, and the tokenizer's own EOS in any case."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        listed = _optional_json(folder / file).get("eos_token_id")
        if listed is not None:
            try:
                ids.update(map(int, listed if isinstance(listed, list) else [listed]))
            except (TypeError, ValueError, OverflowError):
                raise CheckpointError(f"{folder / file}: eos_token_id is no number and no list of numbers") from None
            break
    if eos_id is not None:
        ids.add(eos_id)
    return tuple(sorted(ids))


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the template of conversations, and that of conversations with tools if it is another one.

    In the order of transformers: files of their own, then tokenizer_config.json (one template, or several with names),
    then a processor's chat_template.json. Without a template named `default`, it is that for tools, else the first.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    own, processor = config.get("chat_template"), _optional_json(folder / "chat_template.json").get("chat_template")
    named = _named(own) or _named(processor)
    if found := {name: _read(file, str) for name, file in files.items() if file.is_file()}:
        named = found if "default" in found else named | found
    tool_template = named.get("tool_use")
    default = named.get("default", tool_template or next(iter(named.values()), None))
    return default, None if tool_template == default else tool_template


def _named(template: object) -> dict[str, str]:
    """Return the templates of a field: a text, or a list or an object of named ones."""
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    pairs = template.items() if isinstance(template, dict) else ()
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which is stored as a text or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def canonical_json(tokenizer: Tokenizer) -> bytes:
    """Return tokenizer.json, the same bytes for the same tokenizer in every process."""
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")).encode()


def engine_vocabulary(folder: Path, config: Mapping[str, Any]) -> bytes | None:
    """Return a JSON object with the digest and the `added_tokens`, as in tokenizer.json; None without a vocabulary.

    `config`: the content of tokenizer_config.json. Raise CheckpointError for a vocabulary without control tokens.
    """
    if not any(path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        return None
    digest = hashlib.sha256()
    try:
        for path in sorted({path for pattern in ENGINE_FILES for path in folder.glob(pattern)}):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        tekken = json.loads((folder / "tekken.json").read_bytes()) if (folder / "tekken.json").is_file() else {}
        added = _tekken_tokens(tekken) or _config_tokens(config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its vocabulary cannot be read: {error}") from error
    if not added and not tekken:  # tekken may have none: mistral-common never reads a control token from a text
        raise CheckpointError(
            f"{folder} names no control tokens: list them in added_tokens_decoder of tokenizer_config.json"
        )
    return json.dumps({"digest": digest.hexdigest(), "added_tokens": added}).encode()


def _tekken_tokens(tekken: Mapping[str, Any]) -> list[dict[str, Any]]:
    special = tekken.get("special_tokens") or ()
    return [_token(int(token["rank"]), token["token_str"], bool(token["is_control"])) for token in special]


def _config_tokens(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    decoder: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    return [_token(int(id_), token["content"], bool(token.get("special", False))) for id_, token in decoder.items()]


def _token(id_: int, content: str, special: bool) -> dict[str, Any]:
    return {"id": id_, "content": content, "special": special} | dict.fromkeys(_FLAGS, False)
