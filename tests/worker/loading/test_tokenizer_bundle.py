from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from tests import smollm2
from tests.tiny_model import write_tiny_model
from tests.worker.gguf_files import train, write_tokenizer
from worker.config import WorkerConfig
from worker.files.errors import CheckpointError, UnsupportedModel
from worker.files.tokenizer_files import canonical_json
from worker.loading.engine import build_bundle
from worker.model.gguf import GGUFCheckpoint
from worker.model.gguf_tokenizer import tokenizer_from_gguf
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.wire import TokenizerBundle

_TAUBENCH = Path(__file__).parents[2] / "data" / "taubench_airline_text_dev.jsonl.gz"
_ODD = [
    "don't  stop\n\n\n  now\t!",
    "12345 6.78 90",
    "naïve 漢字 🙂 é",
    "I'LL we'Ve\r\n x",
    "   leading and trailing   ",
    "a\u00a0b ½ ٣٤ _under_score",
]
_CONTROL = ["<|begin|>", "<|end_of_text|>", "<|im_end|>"]
# The patterns as Meta's and Qwen's tokenizer.json files have them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with gzip.open(_TAUBENCH, "rt", encoding="utf-8") as lines:
        contents = {m["content"]: None for line in lines for m in json.loads(line)["messages"] if m.get("content")}
    return [*_ODD, *list(contents)[:150]]


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load_model("", LoadOptions(dtype="bfloat16"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("written"))


@pytest.fixture
def tiny(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "tiny"))


def bundle_of(folder: Path) -> TokenizerBundle:
    return build_bundle(WorkerConfig(), load_model(str(folder), LoadOptions()), 128)


def change(file: Path, **fields: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **fields}))


class TestDefaultModel:
    def test_fields(self, default: LoadedModel) -> None:
        bundle = build_bundle(WorkerConfig(), default, 2048)
        assert bundle.model == "SmolLM2-135M-Instruct"
        assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<|im_start|>", "<|im_end|>", False)
        assert bundle.eos_token_ids == (2,)
        assert (bundle.vocab_size, bundle.max_model_len, bundle.block_size) == (49152, 2048, 16)
        assert bundle.chat_template is not None
        assert "<|im_start|>assistant" in bundle.chat_template

    def test_it_encodes_as_transformers_does(self, default: LoadedModel, texts: list[str]) -> None:
        from transformers import AutoTokenizer

        path = default.checkpoint.path
        reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        # As in SmolLM2's own tokenizer.json; what transformers makes of a GGUF file forgets the digits.
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        bundle = build_bundle(WorkerConfig(), default, 2048)
        tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        for text in texts:
            assert tokenizer.encode(text).ids == reference(text).input_ids, text
            assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_control_tokens_are_special(self, default: LoadedModel) -> None:
        tokenizer = Tokenizer.from_buffer(build_bundle(WorkerConfig(), default, 64).tokenizer_json)
        assert tokenizer.encode("a<|im_end|>").ids[-1] == 2
        assert tokenizer.decode([1, 2, 0]) == ""

    def test_the_fingerprint_is_that_of_the_tokenizer(self, default: LoadedModel) -> None:
        one = build_bundle(WorkerConfig(), default, 2048)
        again = build_bundle(WorkerConfig(block_size=32), default, 64)
        assert one.fingerprint == again.fingerprint
        assert canonical_json(smollm2.tokenizer()) == one.tokenizer_json


class TestGGUFFamilies:
    @pytest.mark.parametrize(
        ("family", "pattern", "digits"),
        [("llama-bpe", _LLAMA3, False), ("qwen2", _QWEN2, False), ("smollm", None, True), ("gpt-2", None, False)],
    )
    def test_encodes_as_the_original(
        self, family: str, pattern: str | None, digits: bool, texts: list[str], tmp_path: Path
    ) -> None:
        original = train(texts, pattern, _CONTROL, digits=digits)
        write_tokenizer(tmp_path / "t.gguf", family, original, _CONTROL)
        rebuilt = tokenizer_from_gguf(GGUFCheckpoint(tmp_path / "t.gguf").metadata)
        for text in texts:
            if family != "llama-bpe":  # whose whole-word rule may shorten the result of merges
                assert rebuilt.encode(text).ids == original.encode(text).ids, text
            assert rebuilt.encode(text).ids != [], text
            assert rebuilt.decode(rebuilt.encode(text).ids) == text

    def test_llama3_takes_whole_words_first(self, tmp_path: Path) -> None:
        """`abc` is a token that no merge makes: Llama 3's tokenizer finds it all the same."""
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(["<b>", "<e>", "a", "b", "c", "ab", "abc"])
        writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        tokenizer = tokenizer_from_gguf(GGUFCheckpoint(tmp_path / "t.gguf").metadata)
        assert tokenizer.encode("abc").tokens == ["abc"]

    @pytest.mark.parametrize("add_bos", [True, None])  # llama.cpp's default for Llama 3, which older files need
    def test_bos_comes_first_where_the_file_says_so(
        self, add_bos: bool | None, tmp_path: Path, texts: list[str]
    ) -> None:
        original = train(texts, _LLAMA3, _CONTROL)
        write_tokenizer(tmp_path / "t.gguf", "llama-bpe", original, _CONTROL, add_bos=add_bos)
        tokenizer = tokenizer_from_gguf(GGUFCheckpoint(tmp_path / "t.gguf").metadata)
        assert tokenizer.encode("hello").ids[0] == 0
        assert tokenizer.encode("hello", add_special_tokens=False).ids[0] != 0

    @pytest.mark.parametrize(("kind", "family"), [("llama", "default"), ("gpt2", "nonesuch")])
    def test_others_are_refused(self, kind: str, family: str, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(family)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(UnsupportedModel, match=family):
            tokenizer_from_gguf(GGUFCheckpoint(tmp_path / "t.gguf").metadata)


class TestFolder:
    def test_fields(self, tiny: Path) -> None:
        bundle = bundle_of(tiny)
        assert (bundle.bos_token, bundle.eos_token, bundle.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
        assert bundle.tokenizer_json == (tiny / "tokenizer.json").read_bytes()
        assert not bundle.add_bos

    def test_tokens_of_an_older_map(self, tiny: Path) -> None:
        config = json.loads((tiny / "tokenizer_config.json").read_text())
        for name in ("bos_token", "eos_token", "added_tokens_decoder"):
            config.pop(name, None)
        (tiny / "tokenizer_config.json").write_text(json.dumps(config))
        (tiny / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
        assert bundle_of(tiny).bos_token == "<|im_start|>"

    def test_eos_ids_of_the_generation_config(self, tiny: Path) -> None:
        change(tiny / "generation_config.json", eos_token_id=[7, 0])
        assert bundle_of(tiny).eos_token_ids == (0, 2, 7)

    @pytest.mark.parametrize("value", [[5, None], {}, "end", float("inf")])
    def test_eos_ids_that_are_no_numbers(self, tiny: Path, value: object) -> None:
        change(tiny / "generation_config.json", eos_token_id=value)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is no number"):
            bundle_of(tiny)

    def test_a_template_that_is_no_text(self, tiny: Path) -> None:
        (tiny / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
            bundle_of(tiny)

    def test_bos_of_the_post_processor(self, tiny: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
        tokenizer.post_processor = template
        tokenizer.save(str(tiny / "tokenizer.json"))
        assert bundle_of(tiny).add_bos

    def test_templates(self, tiny: Path) -> None:
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        change(tiny / "tokenizer_config.json", chat_template=named, eos_token={"content": "<|endoftext|>"})
        bundle = bundle_of(tiny)
        assert (bundle.chat_template, bundle.eos_token) == ("D", "<|endoftext|>")
        (tiny / "chat_template.jinja").write_text("J")
        assert bundle_of(tiny).chat_template == "J"
        assert bundle_of(tiny).fingerprint != bundle.fingerprint

    def test_every_field_that_matters_is_in_the_fingerprint(self, tiny: Path) -> None:
        before = bundle_of(tiny)
        change(tiny / "generation_config.json", eos_token_id=[5])
        after = bundle_of(tiny)
        assert after.fingerprint != before.fingerprint
        kept = dataclasses.replace(after, fingerprint=before.fingerprint, eos_token_ids=before.eos_token_ids)
        assert dataclasses.replace(kept, revision=before.revision) == before

    @pytest.mark.parametrize("content", [None, "{}", "not json"])
    def test_no_tokenizer(self, content: str | None, tiny: Path) -> None:
        file = tiny / "tokenizer.json"
        file.unlink()
        if content is not None:
            file.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            bundle_of(tiny)
