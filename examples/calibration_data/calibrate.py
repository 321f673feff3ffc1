"""Calibrate GPTQ on your own data. The data can be plain text, JSON lines, chats, or Parquet.

Run ``python examples/calibration_data/calibrate.py``. Without ``quark-core[data]``, the script omits Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from quark.errors import MissingPluginError
from quark.torch import ModelQuantizer
from quark_tiny_model import held_out_text, tiny_model, tiny_template, tiny_tokenizer
from quark_workbench.data import read_samples, token_sequences
from quark_workbench.data.files import write_parquet

__all__ = ["files", "main"]

_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
"""A chat template, since the tiny model has none; chat models have their own."""


def files(directory: Path) -> Iterator[Path]:
    """Write an example file of each kind, and yield the paths of the files."""
    text = held_out_text()
    (directory / "text.txt").write_text(text[:6000], encoding="utf-8")
    yield directory / "text.txt"
    lines = [{"text": text[i : i + 500]} for i in range(0, 6000, 500)]
    (directory / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    yield directory / "texts.jsonl"
    chats = [{"messages": [{"role": "user", "content": text[i : i + 300]}]} for i in range(0, 6000, 300)]
    (directory / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    yield directory / "chats.jsonl"
    try:
        write_parquet(directory / "texts.parquet")
    except MissingPluginError as error:
        print(f"texts.parquet: left out, {error}")
    else:
        yield directory / "texts.parquet"


def main() -> None:
    """Quantize the tiny model once for each file."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    with TemporaryDirectory() as directory:
        for file in files(Path(directory)):
            batches = token_sequences(tokenizer, read_samples(file), count=8, length=64, seed=0)
            config = tiny_template().get_config("int4_wo_64", "gptq")
            ModelQuantizer(config).quantize_model(tiny_model(), batches)
            print(f"{file.name}: {sum(batch.numel() for batch in batches)} tokens in {len(batches)} sequences")


if __name__ == "__main__":
    main()
