"""AMD Quark's names for GGUF files."""

from pathlib import Path

import pytest

from quark.errors import CheckpointError, ConfigError
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer, export_gguf
from quark_tiny_model import tiny_model, tiny_tokenizer


def test_the_older_exporter_class_and_the_function_write_gguf_files_with_the_tokenizer_of_that_path(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf", reason="the extra quark-exporters[gguf] is not installed").GGUFReader
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    exporter, model = (
        ModelExporter(tmp_path / "out"),
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model()),
    )
    with pytest.raises(ConfigError, match=r"model_type='qwen2'.*llama"):
        exporter.export_gguf_model(model, str(tmp_path / "tokenizer"), "qwen2")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        exporter.export_gguf_model(model, str(tmp_path), "llama")
    exporter.export_gguf_model(model, str(tmp_path / "tokenizer" / "tokenizer.json"), "llama")
    assert reader(next((tmp_path / "out").glob("*.gguf"))).get_field("tokenizer.ggml.model").contents() == "gpt2"
    export_gguf(model, tmp_path / "function", "llama", tmp_path / "tokenizer")
    export_gguf(model, tmp_path / "own tokenizer")
    written = [next((tmp_path / name).glob("*.gguf")).read_bytes() for name in ("out", "function", "own tokenizer")]
    assert written[0] == written[1] == written[2]
