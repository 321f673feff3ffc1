"""The tokenizer of a GGUF file is that of the model, in llama.cpp's words.

One that llama.cpp does not have is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.errors import CheckpointError, UnsupportedError
from quark_exporters.gguf_layout.vocabulary import write_vocabulary

gguf = pytest.importorskip("gguf", reason="the extra quark-exporters[gguf] is not installed")

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "use_regex": True}
NO_SPLIT = {"type": "ByteLevel", "use_regex": False}


def tokenizer(pre: Any = BYTES, **model: Any) -> dict[str, Any]:
    added = [{"id": 3, "content": "<|end|>", "special": True}, {"id": 4, "content": "<tool>", "special": False}]
    return {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], **model},
        "pre_tokenizer": pre,
        "added_tokens": added,
    }


class Recorder:
    """Stands in for gguf's writer: remembers what is added."""

    def __init__(self) -> None:
        self.added: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.added.__setitem__(name.removeprefix("add_"), value)


def written(content: Any, directory: Path, size: int = 6, pre: str | None = None) -> dict[str, Any]:
    if content is not None:
        (directory / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    recorder = Recorder()
    write_vocabulary(recorder, directory, size, pre)  # type: ignore[arg-type]
    return recorder.added


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}


def test_tokens_have_their_types_and_unused_ids_are_filled_up(tmp_path: Path) -> None:
    added = written(tokenizer(), tmp_path)
    assert added["token_list"] == ["a", "b", "ab", "<|end|>", "<tool>", "[PAD5]"]
    kinds = gguf.TokenType
    assert added["token_types"] == [kinds.NORMAL] * 3 + [kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED]
    assert added["token_merges"] == ["a b"]
    assert added["tokenizer_model"] == "gpt2"


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (BYTES, "gpt-2"),
        (sequence({"type": "Digits", "individual_digits": True}, BYTES), "smollm"),
        (sequence(split(LLAMA_3), NO_SPLIT), "llama-bpe"),
        (sequence(split(LLAMA_3.replace("{1,3}", "")), NO_SPLIT), "qwen2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_way_text_is_split_has_its_name(pre: Any, name: str, tmp_path: Path) -> None:
    assert written(tokenizer(pre), tmp_path)["tokenizer_pre"] == name


def test_another_way_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    other = tokenizer(sequence(split("[0-9]"), NO_SPLIT))
    with pytest.raises(UnsupportedError, match="tokenizer_pre="):
        written(other, tmp_path)
    assert written(other, tmp_path, pre="deepseek-llm")["tokenizer_pre"] == "deepseek-llm"


def test_tokenizers_with_bytes_as_tokens_are_sentence_pieces(tmp_path: Path) -> None:
    content = tokenizer(byte_fallback=True, vocab={"a": 0, "<0x0A>": 1, "b": 2})
    added = written(content, tmp_path)
    assert (added["tokenizer_model"], added["token_types"][1]) == ("llama", gguf.TokenType.BYTE)
    assert added["token_scores"] == sorted(added["token_scores"], reverse=True)
    assert "tokenizer_pre" not in added


def test_without_a_tokenizer_the_file_says_so(tmp_path: Path) -> None:
    assert written(None, tmp_path) == {"tokenizer_model": "none"}


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "BPE"}}', '{"model": 3}'])
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        written(content, tmp_path)


def test_other_kinds_and_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a Unigram model"):
        written(tokenizer(type="Unigram"), tmp_path)
    with pytest.raises(UnsupportedError, match="5 tokens, but the embedding of the model has 4 rows"):
        written(tokenizer(), tmp_path, size=4)


def test_tokens_have_the_type_that_llama_cpp_treats_them_by() -> None:
    gguf = pytest.importorskip("gguf")
    from quark_exporters.gguf_layout.vocabulary import _tokens

    vocabulary = {"a": 0, "<0x0A>": 1, "<0x": 2, "<0x0A>b": 3, "abcdef": 4}
    added = [{"id": 5, "content": "<s>", "special": True}, {"id": 6, "content": "<tool>", "special": False}]
    texts, types = _tokens({"model": {"vocab": vocabulary}, "added_tokens": added}, 8)
    assert texts == [*vocabulary, "<s>", "<tool>", "[PAD7]"]
    kind = gguf.TokenType
    plain = int(kind.NORMAL)
    assert types == [plain, int(kind.BYTE), plain, plain, plain, int(kind.CONTROL), int(kind.USER_DEFINED), int(kind.UNUSED)]
