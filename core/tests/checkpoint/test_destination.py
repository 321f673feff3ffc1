"""Files that may lie in the directory that an export goes to.

An earlier export is replaced only on request, and nothing else is ever deleted.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.base.files import exchange
from quark.checkpoint import destination
from quark.checkpoint.atomic_directory import building
from quark.checkpoint.destination import COMPANIONS, REPLACED, move_into_place, refuse_used_directory
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.errors import ConfigError, OutputError
from quark.models.hf.loading import load_model
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer, export_gguf, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model, tiny_model_dir


def earlier(out: Path, *others: str) -> Path:
    """Return a directory with the files of an earlier export."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quark"}}))
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", *others):
        (out / name).write_text(f"old {name}")
    return out


def contents(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*") if path.is_file()}


def build(out: Path, *, overwrite: bool, **files: str) -> None:
    with building(out, overwrite=overwrite) as directory:
        for name, text in files.items():
            (directory / f"{name}.json").write_text(text)


def quantized(scheme: str = "int4_wo_64") -> nn.Module:
    return ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(tiny_model())


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_processor_that_was_saved_first_stays(overwrite: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in COMPANIONS:
        (out / name).write_text(f"mine {name}")
    build(out, overwrite=overwrite, config="new", tokenizer="new")
    assert contents(out) == {name: f"mine {name}" for name in COMPANIONS} | {"config.json": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_code_that_an_earlier_export_has_copied_is_replaced_and_other_code_is_not(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out", "modeling_own.py", "layers_own.py", "attention_own.py", "norms_own.py")
    block = {"quantization_config": {"quant_method": "quark"}, "auto_map": {"AutoModel": "modeling_own.Model"}}
    (out / "config.json").write_text(json.dumps(block))
    (out / "modeling_own.py").write_text("import torch\nfrom .layers_own import Layer\nfrom . import norms_own\n")
    (out / "layers_own.py").write_text("from .attention_own import (\n    Attention,\n)\nfrom .modeling_own import Model\n")
    (out / "mine.py").write_text("mine")
    before = contents(out)
    with pytest.raises(OutputError, match=r"holds 'mine\.py', which no export writes"):
        build(out, overwrite=True, config="new")
    assert contents(out) == before
    (out / "mine.py").unlink()
    build(out, overwrite=True, config="new")
    assert not list(out.glob("*.py"))


def test_an_earlier_export_is_refused_and_replaced_on_request_alone(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out", "vocab.txt")
    before = contents(out)
    with pytest.raises(OutputError, match="overwrite=True"):
        build(out, overwrite=False, config="new")
    assert contents(out) == before
    build(out, overwrite=True, config="new", tokenizer="new")
    assert contents(out) == {"config.json": "new", "tokenizer.json": "new", "vocab.txt": "old vocab.txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


STRANGERS = {
    "a file of someone else": ("notes.md", "'notes.md', which no export writes"),
    "weights of another form": ("pytorch_model.bin", "'pytorch_model.bin', which no export writes"),
    "weights of another name": ("my_model.safetensors", "'my_model.safetensors', which no export writes"),
}


@pytest.mark.parametrize(("name", "words"), STRANGERS.values(), ids=STRANGERS)
def test_what_no_export_writes_is_never_deleted(name: str, words: str, tmp_path: Path) -> None:
    out = earlier(tmp_path / "out", name)
    before = contents(out)
    with pytest.raises(OutputError, match=words):
        build(out, overwrite=True, config="new")
    assert contents(out) == before


@pytest.mark.parametrize("config", ["{}", '{"quantization_config": {"quant_method": "gptq"}}', "[]", "{", '{"quantization_config": null}'])
def test_checkpoints_of_others_are_never_replaced(config: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(config)
    (out / "model.safetensors").write_text("precious")
    with pytest.raises(OutputError, match="it is no export of quark"):
        build(out, overwrite=True, config="new")
    assert contents(out) == {"config.json": config, "model.safetensors": "precious"}


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(earlier(tmp_path / "out"))
    with pytest.raises(OutputError, match="it is a link"):
        refuse_used_directory(tmp_path / "link", overwrite=True)


def test_a_subdirectory_is_left_alone(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    (out / "runs").mkdir()
    with pytest.raises(OutputError, match="'runs', which no export writes"):
        refuse_used_directory(out, overwrite=True)


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    before = contents(out)
    with pytest.raises(TypeError):
        build(out, overwrite=True, config="new", tokenizer=None)  # type: ignore[arg-type]
    assert contents(tmp_path) == {f"out/{name}": text for name, text in before.items()}


def test_what_comes_while_an_export_is_built_is_not_deleted(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    built = ExitStack()
    (built.enter_context(building(out, overwrite=True)) / "config.json").write_text("new")
    (out / "notes.md").write_text("written meanwhile")
    with pytest.raises(OutputError, match=r"'notes\.md', which no export writes"):
        built.close()
    assert (out / "notes.md").read_text() == "written meanwhile"


def test_if_the_new_export_cannot_be_moved_the_earlier_one_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = earlier(tmp_path / "out")
    before, rename = contents(out), Path.rename

    def fails_once_the_place_is_free(self: Path, target: Path) -> Path:
        if target == out and self.name != REPLACED:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(destination, "exchange", cannot_exchange)
    monkeypatch.setattr(Path, "rename", fails_once_the_place_is_free)
    with pytest.raises(OutputError, match="could not be written"):
        build(out, overwrite=True, config="new")
    assert contents(tmp_path) == {f"out/{name}": text for name, text in before.items()}
    (new := tmp_path / "new").mkdir()
    with pytest.raises(PermissionError):
        move_into_place(new, out, overwrite=True)
    assert contents(out) == before, "at once, and not when the directory beside it is removed"


def cannot_exchange(one: Path, other: Path) -> bool:
    """Stands in for `exchange` on a file system that cannot."""
    return False


def test_an_export_that_is_replaced_has_its_name_until_the_new_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, spare = earlier(tmp_path / "out"), tmp_path / "spare"
    spare.mkdir()
    if not exchange(spare, out):
        pytest.skip("this file system cannot exchange directories")
    exchange(spare, out)
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a rename leaves no export for an instant"))
    build(out, overwrite=True, config="new")
    assert contents(out)["config.json"] == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "spare"]


def test_what_cannot_be_exchanged_is_replaced_by_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "exchange", cannot_exchange)
    out = earlier(tmp_path / "out")
    build(out, overwrite=True, config="new")
    assert contents(out)["config.json"] == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_export_that_a_killed_run_had_moved_aside_is_put_back_by_the_next(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    before = contents(out)
    partial = tmp_path / ".out.12345678.partial"
    (partial / "checkpoint").mkdir(parents=True)
    (partial / "owner.lock").write_text("process 1\n")
    out.rename(partial / REPLACED)
    with pytest.raises(OutputError, match="overwrite=True"):
        build(out, overwrite=False, config="new")
    assert contents(tmp_path) == {f"out/{name}": text for name, text in before.items()}


def test_every_way_to_export_takes_the_wish(tmp_path: Path) -> None:
    model, out = quantized(), tmp_path / "out"
    export_safetensors(model, out)
    (out / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(OutputError, match="overwrite=True"):
        export_safetensors(model, out)
    export_safetensors(model, out, overwrite=True)
    ModelExporter(out).export_safetensors_model(model, overwrite=True)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(import_model_from_safetensors(None, out)(ids).logits, model(ids).logits)


def test_a_model_replaces_the_very_files_that_it_was_loaded_from(tmp_path: Path) -> None:
    model, out = quantized(), tmp_path / "out"
    export_safetensors(model, out)
    export_safetensors(import_model_from_safetensors(None, out), out, overwrite=True)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(import_model_from_safetensors(None, out)(ids).logits, model(ids).logits)


def test_a_directory_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    with pytest.raises(OutputError, match="not empty"):
        quantize_checkpoint(tmp_path / "there is none", out, LLMTemplate.get("llama").get_config(scheme="int8"))
    with pytest.raises(OutputError, match="not empty"):
        export_safetensors(tiny_model(), out)  # which is not even quantized
    with pytest.raises(ConfigError, match="has not been quantized"):
        export_safetensors(tiny_model(), out, overwrite=True)
    assert tiny_model_dir().is_dir()


@pytest.mark.parametrize("part", ["", "model.layers.0"])
def test_a_compiled_model_is_not_exported_under_the_names_of_its_wrapper(part: str, tmp_path: Path) -> None:
    model: Any = quantized("uint4_wo_32")
    if part:
        model.set_submodule(part, torch.compile(model.get_submodule(part)))
    else:
        model = torch.compile(model)
    with pytest.raises(ConfigError, match="was compiled"):
        export_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exports_that_write_other_files_lie_in_one_directory_and_replace_their_own_alone(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, out = quantized("uint4_wo_32"), tmp_path / "out"
    export_safetensors(model, out)
    weights = (out / "model.safetensors").read_bytes()
    export_gguf(model, out, "llama")
    assert (out / "model.safetensors").read_bytes() == weights
    with pytest.raises(OutputError, match=r"holds 'llama\.gguf'"):
        export_gguf(model, out, "llama")
    with pytest.raises(OutputError, match=r"holds 'config\.json'"):
        export_safetensors(model, out)
    (out / "model.safetensors").write_bytes(b"damaged")
    llama = (out / "llama.gguf").read_bytes()
    (out / "llama.gguf").write_bytes(b"mine")
    export_safetensors(model, out, overwrite=True)
    assert ((out / "model.safetensors").read_bytes(), (out / "llama.gguf").read_bytes()) == (weights, b"mine")
    export_with("gguf", model, out, ExportOptions(overwrite=True, own={"file_name": "llama.gguf"}))
    assert ((out / "model.safetensors").read_bytes(), (out / "llama.gguf").read_bytes()) == (weights, llama)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_strangers_are_in_the_way_of_every_exporter(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "runs.onnx").mkdir(parents=True)
    for exporter in ("gguf", "onnx", "safetensors", "fp8"):
        with pytest.raises(OutputError, match=r"'runs\.onnx'"):
            refuse_used_directory(out, exporter)
    (out / "runs.onnx").rmdir()
    (out / "config.json").touch()
    refuse_used_directory(out, "gguf")
    with pytest.raises(OutputError, match="config"):
        refuse_used_directory(out, "fp8")
    (out / "notes.md").touch()
    with pytest.raises(OutputError, match="notes"):
        refuse_used_directory(out, "gguf")


def test_what_an_exporter_writes_beyond_its_record_replaces_nothing(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    before = contents(out)
    with (
        pytest.raises(OutputError, match=r"holds 'config\.json' of another exporter, and 'gguf' writes it too"),
        building(out, "gguf") as directory,
    ):
        (directory / "config.json").write_text("new")
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_companions_of_an_earlier_export_are_in_nobodys_way(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source = Path(shutil.copytree(tiny_model_dir(), tmp_path / "source"))
    (source / "LICENSE").write_text("free")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text("{}")
    config, out = LLMTemplate.get("llama").get_config(scheme="uint4_wo_32"), tmp_path / "out"
    quantize_checkpoint(source, out, config)
    files = names(out)
    assert {"LICENSE", "1_Pooling/config.json", "PROVENANCE.md"} < files
    model = ModelQuantizer(config).quantize_model(load_model(source))
    export_gguf(model, out, "llama")
    assert files < names(out)
    quantize_checkpoint(source, out, config, options=ExportOptions(overwrite=True))
    assert names(out) == files | {path.name for path in out.glob("*.gguf")}
    export_safetensors(model, out, overwrite=True)
    (out / "LICENSE").write_text("mine")
    with pytest.raises(OutputError, match=r"holds 'LICENSE', which no export writes"):
        quantize_checkpoint(source, out, config, options=ExportOptions(overwrite=True))
    assert (out / "LICENSE").read_text() == "mine"


def test_the_source_and_a_copy_of_it_are_never_written_over(tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model_dir(), tmp_path / "source"))
    copy, config = Path(shutil.copytree(source, tmp_path / "copy")), LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    weights = (source / "model.safetensors").read_bytes()
    for out in (source, copy):
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=r"not empty|cannot be replaced"):
                quantize_checkpoint(source, out, config, options=ExportOptions(overwrite=overwrite))
        assert (out / "model.safetensors").read_bytes() == weights
