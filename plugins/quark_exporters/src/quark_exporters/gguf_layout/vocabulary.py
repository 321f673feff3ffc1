"""Functions that write the tokens, merges, special tokens and chat template of a tokenizer to a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["write_vocabulary"]

_BYTE_LEVEL = "gpt2"
_SENTENCE_PIECE = "llama"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {f"{_LETTERS}{{1,3}}{_REST}": "llama-bpe", f"{_LETTERS}{_REST}": "qwen2"}
"""Maps the regular expression of a pre-tokenizer to llama.cpp's name for the pre-tokenizer."""


def write_vocabulary(writer: GGUFWriter, directory: Path, size: int, pre: str | None = None) -> None:
    """Write the tokenizer of ``directory`` to a GGUF file.

    If the directory has no tokenizer, the file says that the model has no tokenizer.

    Args:
        writer: Writer of the GGUF file.
        directory: Directory with ``tokenizer.json``, and perhaps further files with settings of the
            tokenizer.
        size: Number of rows of the embedding. Rows without a token get a padding token.
        pre: llama.cpp's name for the pre-tokenizer (``tokenizer.ggml.pre``). With None, this function detects
            the name.

    Raises:
        UnsupportedError: The tokenizer is not a BPE model, has more tokens than ``size``, or has an unknown
            pre-tokenizer.
        CheckpointError: ``tokenizer.json`` cannot be read.
    """
    import gguf

    path = directory / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("none")
        return
    try:
        tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = _kind(tokenizer)
        tokens, types = _tokens(tokenizer, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not a valid tokenizer ({type(error).__name__}: {error}). Download it again") from error
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == _SENTENCE_PIECE:
        # SentencePiece numbers the pieces of a BPE model in merge order, and scores contain only that order.
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_tokenizer_pre(pre or _pre_of(tokenizer))
    gguf.SpecialVocab(directory, load_merges=kind == _BYTE_LEVEL, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)


def _kind(tokenizer: dict[str, Any]) -> str:
    model = tokenizer["model"]
    if model.get("type") == "BPE":
        return _SENTENCE_PIECE if model.get("byte_fallback") else _BYTE_LEVEL
    raise UnsupportedError(
        f"the tokenizer is a {model.get('type')} model, but the GGUF exporter needs BPE. Export the model as safetensors"
    )


def _tokens(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return two lists, with the text and with the type of each token.

    The position in a list is the id of the token.
    """
    from gguf import TokenType

    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    text_of = {i: text for text, i in vocabulary.items()}
    type_of = {i: TokenType.BYTE for text, i in vocabulary.items() if len(text) == 6 and text.startswith("<0x")}
    for added in tokenizer.get("added_tokens") or ():
        text_of[added["id"]] = added["content"]
        type_of[added["id"]] = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    count = max(size, 1 + max(text_of))
    if count > size:
        raise UnsupportedError(
            f"the tokenizer has {count} tokens, but the embedding of the model has {size} rows. Use the tokenizer of this model"
        )
    for i in range(count):
        if i not in text_of:
            text_of[i], type_of[i] = f"[PAD{i}]", TokenType.UNUSED
    return [text_of[i] for i in range(count)], [int(type_of.get(i, TokenType.NORMAL)) for i in range(count)]


def _pre_of(tokenizer: dict[str, Any]) -> str:
    """Return the name that llama.cpp uses for the pre-tokenizer of a tokenizer."""
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        expression = (steps[0].get("pattern") or {}).get("Regex", "")
        if expression in _SPLITS:
            return _SPLITS[expression]
    raise UnsupportedError(
        "quark does not know the pre-tokenizer of this tokenizer. Set the exporter option tokenizer_pre to its name in llama.cpp, such as "
        "tokenizer_pre=deepseek-llm"
    )
