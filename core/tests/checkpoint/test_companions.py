"""Companions of a checkpoint: files of the float checkpoint, or the caller's tokenizer.

Companions never overwrite other files.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import pytest
from torch import nn

from quark.checkpoint import companions, save_companions
from quark.checkpoint.companions import companions_of, copied_companions, copy_companions
from quark.errors import OutputError
from quark_tiny_model import tiny_model, tiny_model_dir


class Tokenizer:
    def save_pretrained(self, directory: object) -> None:
        Path(str(directory), "tokenizer.json").write_text("mine")


class Broken:
    def save_pretrained(self, directory: object) -> None:
        raise RuntimeError("no vocabulary")


def test_files_beside_the_float_checkpoint_are_copied(tmp_path: Path) -> None:
    save_companions(tiny_model(), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tiny_model_dir() / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("*.safetensors"))


def test_files_of_a_directory_of_another_model_stay_there_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (other / "tokenizer.json").write_text("of another model")
    model = tiny_model()
    model.config.name_or_path = str(other)
    (tmp_path / "out").mkdir()
    save_companions(model, tmp_path / "out")
    assert not (tmp_path / "out/tokenizer.json").exists()
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"was loaded from '{other}', which has no config.json of the model type 'llama'" in warning


def test_a_tokenizer_that_is_given_takes_their_place(tmp_path: Path) -> None:
    save_companions(tiny_model(), tmp_path, Tokenizer())
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_a_model_outside_transformers_has_the_tokenizer_alone(tmp_path: Path) -> None:
    save_companions(nn.Linear(2, 2), tmp_path, Tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_tokenizer_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"a Broken, cannot be saved \(RuntimeError: no vocabulary\)\. Give another tokenizer, or None"):
        save_companions(nn.Linear(2, 2), tmp_path, Broken())


def written(directory: Path, **files: str | bytes) -> Path:
    """Return a directory with these files; ``__`` in a name separates folders."""
    return tree(directory, {name.replace("__", "/"): content for name, content in files.items()})


def tree(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def copied(source: Path, directory: Path) -> dict[str, bytes]:
    """Return the contents of the copied files by name."""
    directory.mkdir()
    copy_companions(source, directory)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


OF_A_MODEL = {
    "tekken.json": "{}",
    "qwen.tiktoken": "IQ== 0",
    "sentencepiece.bpe.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0",
    "spiece.model": b"\n\x0e",
    "LICENSE": "free",
    "LICENSE.txt": "free",
    "NOTICE": "",
    "README.md": "# A model",
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "modules.json": json.dumps([{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "2_Dense"}]),
    "config_sentence_transformers.json": "{}",
    "sentence_bert_config.json": "{}",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "1_Pooling/deeper/still.txt": "",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": b"\x80\2 and six more bytes, the size of a header, are no serialized objects",
    "language_model.vocab": "",
    "normalizer.json": "{}",
    "of.an.unknown.ending": "",
}
"""Files that belong to a model, with their content."""
NOT_OF_A_RESULT = {
    "pytorch_model.bin": "weights in another form",
    "consolidated.safetensors": "weights in another form",
    "model.fp16.safetensors": "weights in another form",
    "pytorch_model.bin.index.json": "weights in another form",
    "model.gguf": "weights in another form",
    "tf_model.h5": "weights in another form",
    "onnx": "weights in another form",
    "original": "weights in another form",
    "checkpoint-500": "weights in another form",
    "params.json": "configuration of weights in another form",
    "adapter_config.json": "of an adapter",
    "quantize_config.json": "how the source is quantized",
    "quant_config.json": "how the source is quantized",
    "hf_quant_config.json": "how the source is quantized",
    "training_args.bin": "weights in another form",
    "runs": "about the run or training",
    "quark_run.json": "about the run or training",
    "convert.py": "no config names",
    "install.sh": "no config names",
    "a_script": "no config names",
    "state.dat": "no config names",
    "archive.zip": "no config names",
    "kernel.so": "no config names",
}
"""Why a file or folder is left out, by name."""
CONTENTS: dict[str, bytes] = {
    "state.dat": pickle.dumps({"a": 1}),
    "a_script": b"#!/bin/sh\nrm -rf x",
    "archive.zip": b"PK\3\4",
    "kernel.so": b"\x7fELF",
}
INSIDE = {"onnx": "model.onnx", "original": "consolidated.00.pth", "checkpoint-500": "model.safetensors", "runs": "events.out"}


def model_directory(directory: Path) -> Path:
    """A checkpoint with all of these files, hidden ones, and its own weights."""
    others = {f"{name}/{INSIDE[name]}" if name in INSIDE else name: CONTENTS.get(name, b"{}") for name in NOT_OF_A_RESULT}
    own = {"config.json": "{}", "model.safetensors": "", "model-00001-of-00002.safetensors": "", "model.safetensors.index.json": "{}"}
    return tree(directory, OF_A_MODEL | others | own | {".gitattributes": "", ".cache/huggingface/x": "", "__pycache__/a.pyc": ""})


def test_all_that_belongs_to_a_model_is_copied_and_the_rest_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model_directory(tmp_path / "source")
    with caplog.at_level(logging.INFO):
        files = copied(source, tmp_path / "out")
    assert files == {name: content if isinstance(content, bytes) else content.encode() for name, content in OF_A_MODEL.items()}
    left_out = companions_of(source).left_out
    assert left_out.keys() == NOT_OF_A_RESULT.keys()
    assert all(reason in left_out[name] for name, reason in NOT_OF_A_RESULT.items())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "params.json (the configuration of weights in another form)" in record.message


def test_code_that_a_config_names_belongs_to_the_model(tmp_path: Path) -> None:
    source = tree(
        tmp_path / "source",
        {
            "config.json": json.dumps({"auto_map": {"AutoModel": "modeling_own.Model"}}),
            "modules.json": json.dumps([{"path": "", "type": "custom_st.Transformer"}]),
            "modeling_own.py": "from .layers import Layer",
            "layers.py": "",
            "custom_st.py": "from . import shared",
            "shared.py": "",
            "zero_to_fp32.py": "",
        },
    )
    assert {"modeling_own.py", "layers.py", "custom_st.py", "shared.py"} < copied(source, tmp_path / "out").keys()
    assert companions_of(source).left_out.keys() == {"zero_to_fp32.py"}


@pytest.mark.parametrize(
    "content", ["{", "[1]", "{}", '[{"path": 3}]', "[[]]", '[{"path": "../elsewhere", "type": "../x.Y"}]', "[" * 100_000]
)
def test_a_damaged_modules_json_is_copied_and_does_no_harm(content: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", LICENSE="free")
    (source / "modules.json").write_text(content)
    assert copied(source, tmp_path / "out").keys() == {"LICENSE", "modules.json"}


def test_a_part_that_is_a_pickle_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tree(
        tmp_path / "source", {"modules.json": '[{"path": "2_Dense"}]', "2_Dense/config.json": "{}", "2_Dense/pytorch_model.bin": b"\x80\2"}
    )
    assert copied(source, tmp_path / "out").keys() == {"modules.json", "2_Dense/config.json"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2_Dense/pytorch_model.bin (weights of a part of the model in a form that may run code" in record.message


@pytest.mark.posix("links are allowed to few users of Windows")
def test_no_link_leads_out_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree(tmp_path, {"secret": "key", "folder/secret": "key", "source/LICENSE": "free", "source/sub/a": "a"})
    source = tmp_path / "source"
    (source / "tokenizer.json").symlink_to("../secret")
    (source / "absolute.json").symlink_to(tmp_path / "secret")
    (source / "folder").symlink_to("../folder")
    (source / "sub/up").symlink_to("../../secret")
    (source / "around").symlink_to(".")
    (source / "dangling").symlink_to("nowhere")
    (source / "loop").symlink_to("loop")
    (source / "COPYING").symlink_to("LICENSE")
    os.mkfifo(source / "pipe.json")
    (tmp_path / "named").symlink_to("source")
    for place, name in ((source, "out"), (tmp_path / "named", "other")):
        files = copied(place, tmp_path / name)
        assert files == {"LICENSE": b"free", "COPYING": b"free", "sub/a": b"a"}
        assert not [path for path in (tmp_path / name).rglob("*") if path.is_symlink()]
    assert "a link out of the checkpoint" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.posix("links are allowed to few users of Windows")
def test_the_links_of_a_cache_of_models_are_followed_into_its_store(tmp_path: Path) -> None:
    cache = tree(tmp_path / "models--m", {"blobs/12": "free", "blobs/34": "{}", "refs/main": "abc", "snapshots/abc/x": ""})
    revision = cache / "snapshots/abc"
    (revision / "1_Pooling").mkdir()
    (revision / "LICENSE").symlink_to("../../blobs/12")
    (revision / "1_Pooling/config.json").symlink_to("../../../blobs/34")
    (revision / "main").symlink_to("../../refs/main")
    assert copied(revision, tmp_path / "out") == {"LICENSE": b"free", "1_Pooling/config.json": b"{}", "x": b""}


def test_sizes_and_numbers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "_LARGEST", 10)
    source = tree(tmp_path / "source", {"large.json": "x" * 11, "a/b/c/d/deep": "", **{f"{i:02}": "x" * 10 for i in range(20)}})
    found = companions_of(source)
    assert (found.left_out["large.json"], len(found.files)) == ("too large", 20)
    assert found.left_out["a/b/c/d"] == "in too deeply nested folders"
    monkeypatch.setattr(companions, "_MOST_BYTES", 55)
    assert companions_of(source).files == ("00", "01", "02", "03", "04")
    assert companions_of(source).left_out["05"] == "too many files"
    monkeypatch.setattr(companions, "_MOST_FILES", 3)
    assert companions_of(source).files == ("00", "01", "02")


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"LICENSE": "of the source", "1_Pooling/config.json": "of the source"})
    out = tree(tmp_path / "out", {"LICENSE": "mine"})
    copy_companions(source, out)
    assert (out / "LICENSE").read_text() == "mine"
    assert (out / "1_Pooling/config.json").read_text() == "of the source"


def test_a_copy_is_told_by_its_bytes(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"LICENSE": "free", "1_Pooling/config.json": "{}", "config.json": "{}", "model.safetensors": "x"})
    (source / "pytorch_model.bin").write_text("x")
    out = Path(shutil.copytree(source, tmp_path / "out"))
    assert copied_companions(out, source) == {"LICENSE", "1_Pooling"}, "weights and config.json are nobody's companions"
    assert copied_companions(out, None) == copied_companions(out, tmp_path / "none") == set()
    tree(out, {"LICENSE": "mine", "1_Pooling/more": "", "notes": ""})
    (out / "empty").mkdir()
    assert copied_companions(out, source) == set()


def test_what_cannot_be_read_is_said_and_costs_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree(tmp_path / "source", {"LICENSE": "free", "lost+found/x": "", "secret.json": ""})
    plain, plain_open = Path.iterdir, Path.open

    def iterdir(self: Path) -> object:
        if self.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return plain(self)

    def opened(self: Path, *args: str) -> object:
        if self.name == "secret.json":
            raise PermissionError(13, "Permission denied")
        return plain_open(self, *args)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "open", opened)
    assert companions_of(source).left_out == {"lost+found": "cannot be read", "secret.json": "cannot be read"}
    assert companions_of(source).files == ("LICENSE",)


def test_a_model_whose_checkpoint_has_gone_has_no_companions(tmp_path: Path) -> None:
    model = tiny_model()
    model.config._name_or_path = str(tmp_path / "gone")
    (out := tmp_path / "out").mkdir()
    save_companions(model, out)
    assert [path.name for path in out.iterdir()] == ["generation_config.json"]
