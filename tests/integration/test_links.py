"""Nothing outside a checkpoint gets into what is made of it: by no link, no path in a file, and no name of a directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from quark.checkpoint import ExportOptions
from quark.config.templates.template import LLMTemplate
from quark.errors import CheckpointError, QuarkError
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import ModelQuantizer, export_safetensors
from quark_tiny_model import tiny_model_dir

SECRET = "The private key 0xC0FFEE."
WEIGHT = torch.arange(64, dtype=torch.float32)
"""A tensor of somebody else, whose bytes are looked for too."""
JSON = json.dumps({"secret": SECRET})
OTHERS = {
    "README.md": SECRET,
    "LICENSE": SECRET,
    "chat_template.jinja": SECRET,
    "chat_template.json": JSON,
    "additional_chat_templates/tools.jinja": SECRET,
    "vocab.json": JSON,
    "vocab.txt": SECRET,
    "merges.txt": SECRET,
    "added_tokens.json": "{}",
    "special_tokens_map.json": JSON,
    "tokenizer_config.json": JSON,
    "tokenizer.json": JSON,
    "tokenizer.model": SECRET,
    "preprocessor_config.json": JSON,
    "processor_config.json": JSON,
    "generation_config.json": JSON,
    "modules.json": json.dumps([{"path": "1_Pooling", "type": "custom_st.Model", "secret": SECRET}]),
    "1_Pooling/config.json": JSON,
    "custom_st.py": f"# {SECRET}",
    "modeling_own.py": f"from .layers import Layer  # {SECRET}",
    "layers.py": f"# {SECRET}",
    "of.another.kind": SECRET,
}
"""Files that are read from a checkpoint, or copied to what is made of it; with what lies at the other place."""


def checkpoint(directory: Path) -> Path:
    shutil.copytree(tiny_model_dir(), directory)
    _changed(directory / "config.json", auto_map={"AutoModel": "modeling_own.Own"})
    (directory / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "custom_st.Model"}]))
    for name in ("modeling_own.py", "layers.py", "custom_st.py"):
        (directory / name).write_text("from .layers import Layer")
    return directory


def _changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantized(source: Path, out: Path) -> str:
    """What quantizing a checkpoint ends in: "", or the message of the refusal."""
    try:
        quantize_checkpoint(source, out, LLMTemplate.get("llama").get_config(scheme="int4_wo_32"))
    except QuarkError as error:
        return str(error)
    return ""


def leaked(*directories: Path) -> list[str]:
    marks = (SECRET.encode(), WEIGHT.numpy().tobytes())
    files = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    return [path.name for path in files if any(mark in path.read_bytes() for mark in marks)]


def _absolute(link: Path, target: Path) -> None:
    link.symlink_to(target)


def _relative(link: Path, target: Path) -> None:
    link.symlink_to(Path(*[".."] * len(link.relative_to(target.parent.parent).parts[1:])) / target.relative_to(target.parent.parent))


def _chained(link: Path, target: Path) -> None:
    """By a link inside the checkpoint, whose name nobody asks for, to one of another directory."""
    (target.parent / "second").symlink_to(target)
    (link.parent / ".first").symlink_to(target.parent / "second")
    link.symlink_to(".first")


def _by_directory(link: Path, target: Path) -> None:
    """By a link to the directory."""
    (link.parent / ".elsewhere").symlink_to(target.parent)
    link.symlink_to(f".elsewhere/{target.name}")


def _by_store(link: Path, target: Path) -> None:
    """As a cache of models, whose store is a link."""
    base = target.parent.parent / "models--m"
    if not (base / "blobs").is_symlink():
        (base / "blobs").symlink_to(target.parent)
    link.symlink_to(base / "blobs" / target.name)


LINKS = {"absolute": _absolute, "relative": _relative, "chain": _chained, "directory": _by_directory, "store": _by_store}


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", LINKS)
def test_no_file_outside_a_checkpoint_gets_into_the_result(kind: str, name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / ("models--m/snapshots/abc" if kind == "store" else "source"))
    (tmp_path / "private").mkdir()
    (tmp_path / "private/secret").write_text(OTHERS[name])
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    LINKS[kind](source / name, tmp_path / "private/secret")
    assert (source / name).read_text() == OTHERS[name]  # the link is one
    message = quantized(source, tmp_path / "out")
    assert not leaked(tmp_path / "out")
    assert message == "" or f"'{source / name}'" in message


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize("name", ["1_Pooling", "additional_chat_templates", "of_users"])
def test_no_directory_outside_a_checkpoint_gets_into_the_result(name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "private").mkdir()
    for file in ("config.json", "tools.jinja", "key"):
        (tmp_path / "private" / file).write_text(SECRET)
    (source / name).symlink_to(tmp_path / "private")
    quantized(source, tmp_path / "out")
    assert not leaked(tmp_path / "out")


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-1.safetensors", "model.safetensors.index.json"])
def test_config_and_weights_are_not_read_by_a_link_out_of_the_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / ("models--m/snapshots/abc" if kind == "store" else "source"))
    (tmp_path / "private").mkdir()
    if "-1" in name or "index" in name:
        (source / "model.safetensors").rename(source / "model-1.safetensors")
        save_file({"of_somebody.weight": WEIGHT}, source / "model-2.safetensors")
        index = dict.fromkeys(_names(source / "model-1.safetensors"), "model-1.safetensors") | {"of_somebody.weight": "model-2.safetensors"}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (source / name).rename(tmp_path / "private/secret")
    LINKS[kind](source / name, tmp_path / "private/secret")
    assert "outside the checkpoint, and is not read" in quantized(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _names(path: Path) -> list[str]:
    from quark.models.hf.shards import read_header

    return list(read_header(path).tensors)


@pytest.mark.parametrize("where", ["weight_map", "auto_map", "modules.json", "auto_map of a tokenizer", "import"])
@pytest.mark.parametrize("path", ["../private/secret", "..", "/{root}/private/secret", "sub/../../private/secret"])
def test_no_path_in_a_file_of_a_checkpoint_leads_out_of_it(path: str, where: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "private").mkdir()
    (source / "sub").mkdir()
    for file in ("secret.py", "config.json", "secret"):
        (tmp_path / "private" / file).write_text(f"# {SECRET}")
    save_file({"of_somebody.weight": WEIGHT}, tmp_path / "private/secret.safetensors")
    path = path.replace("/{root}", str(tmp_path))
    match where:
        case "weight_map":
            weights = dict.fromkeys(_names(source / "model.safetensors"), "model.safetensors")
            index = {"weight_map": weights | {"of_somebody.weight": f"{path}.safetensors"}}
            (source / "model.safetensors.index.json").write_text(json.dumps(index))
        case "auto_map":
            _changed(source / "config.json", auto_map={"AutoModel": f"{path}.Own"})
        case "auto_map of a tokenizer":
            _changed(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [f"{path}.Own", None]})
        case "modules.json":
            (source / "modules.json").write_text(json.dumps([{"path": path, "type": f"{path}.Own"}]))
        case "import":
            (source / "modeling_own.py").write_text(f"from .{path} import x\nfrom . import {path}")
    quantized(source, tmp_path / "out")
    assert not leaked(tmp_path / "out")


PARTS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "_name_or_path": lambda config, place: config.update(_name_or_path=place),
    "name_or_path": lambda config, place: config.update(name_or_path=place),
}


@pytest.mark.parametrize("key", PARTS)
@pytest.mark.parametrize("route", ["disk", "python", "part"])
def test_no_config_says_from_where_files_are_copied(route: str, key: str, tmp_path: Path) -> None:
    """A config.json can name any directory, for the model or a part of it."""
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 32, "vocab_size": 64}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    whole = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    for name, content in {"key": SECRET, "config.json": '{"auths": {}}'}.items():
        (tmp_path / "private" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "private" / name).write_text(content)
    model = AutoModelForCausalLM.from_config(whole.text_config)
    source = tmp_path / "source"
    model.save_pretrained(source)
    whole.architectures = ["Gemma3ForCausalLM"]
    whole.save_pretrained(source)
    values = json.loads((source / "config.json").read_text())
    PARTS[key](values, str(tmp_path / "private"))
    PARTS[key](values["text_config"], str(tmp_path / "private"))
    (source / "config.json").write_text(json.dumps(values))
    (source / "LICENSE").write_text("free")
    config = LLMTemplate.get("gemma3").get_config(scheme="int4_wo_32")
    if route == "disk":
        quantize_checkpoint(source, tmp_path / "out", config)
        assert (tmp_path / "out/LICENSE").read_text() == "free"
    else:
        loaded = AutoConfig.from_pretrained(source)
        model.config = loaded.text_config if route == "part" else type(loaded.text_config).from_pretrained(source)
        export_safetensors(ModelQuantizer(config).quantize_model(model), tmp_path / "out")
    assert not leaked(tmp_path / "out")


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_model_in_memory_is_not_exported_with_settings_from_outside(name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    _changed(source / "config.json", auto_map={}, secret=SECRET)
    (source / "generation_config.json").write_text(JSON)
    (source / name).rename(tmp_path / "secret")
    (source / name).symlink_to(tmp_path / "secret")
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_32")).quantize_model(
        AutoModelForCausalLM.from_pretrained(source)
    )
    with pytest.raises(CheckpointError, match=f"{name}' is a link to .*, outside the checkpoint"):
        export_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_tokenizer_of_a_gguf_file_is_not_from_outside(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    _changed(source / "tokenizer_config.json", chat_template=SECRET)
    (source / "tokenizer_config.json").rename(tmp_path / "secret")
    (source / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    quantize_checkpoint(source, tmp_path / "out", config, exporter="gguf", options=ExportOptions())
    assert not leaked(tmp_path / "out")
