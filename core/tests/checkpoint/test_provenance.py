"""A checkpoint names the distributions of its formats, observers and algorithms, and an error in reading
names them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from quark.base.version import VERSION
from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.checkpoint.provenance import provenance
from quark.errors import CheckpointError, UnknownNameError
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import tiny_model

BUILT_IN = {"distribution": "quark-schemes", "version": VERSION}


def read_ours(directory: Path) -> object:
    return import_model_from_safetensors(None, directory, device="cpu")


def read_by_transformers(directory: Path) -> object:
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


READERS = pytest.mark.parametrize("read", [read_ours, read_by_transformers])


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    export_safetensors(ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model()), out)
    return out


def changed(export: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(export, out)
    data = json.loads((out / "config.json").read_text())
    change(data["quantization_config"])
    (out / "config.json").write_text(json.dumps(data))
    return out


def test_formats_observers_and_algorithms_are_written_with_their_distributions() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="nvfp4", algorithm=["gptq"], kv_cache_scheme="fp8")
    found = provenance(config)
    assert found["formats"] == {name: BUILT_IN | {"layout_version": 1} for name in ("fp4", "fp8_e4m3")}
    assert found["observers"]
    assert all(entry == BUILT_IN for entry in found["observers"].values())
    assert found["algorithms"] == {"gptq": {"distribution": "quark-algos", "version": VERSION}}


def test_they_are_in_the_checkpoint_and_kept_when_it_is_read(export: Path) -> None:
    written = json.loads((export / "config.json").read_text())["quantization_config"]["plugins"]
    assert written["formats"] == {"int4": BUILT_IN | {"layout_version": 1}}
    model = import_model_from_safetensors(None, export, device="cpu")
    assert model.quant_config.written_with == written


@READERS
def test_a_format_that_is_not_installed_is_told_of_with_who_brought_it(
    read: Callable[[Path], object], export: Path, tmp_path: Path
) -> None:
    def foreign(config: dict[str, Any]) -> None:
        config["plugins"]["formats"]["acme_nf3"] = {"distribution": "acme-quant", "version": "0.1.0", "layout_version": 1}

    with pytest.raises(UnknownNameError, match=r"written with the format 'acme_nf3' of acme-quant 0\.1\.0\. Install that"):
        read(changed(export, tmp_path / "out", foreign))


@READERS
@pytest.mark.parametrize(("layout", "cure"), [(2, "Run pip install --upgrade quark-schemes"), (0, "Install the version that wrote")])
def test_another_layout_is_refused(read: Callable[[Path], object], layout: int, cure: str, export: Path, tmp_path: Path) -> None:
    def other(config: dict[str, Any]) -> None:
        config["plugins"]["formats"]["int4"] |= {"version": "9.0", "layout_version": layout}

    told = f"'int4' in layout {layout}, written with quark-schemes 9.0. The installed quark-schemes {VERSION} reads only layout 1. {cure}"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        read(changed(export, tmp_path / "out", other))


@pytest.mark.parametrize(
    "said",
    [None, [], "x", {"formats": None}, {"formats": ["int4"]}, {"formats": {"int4": 3}}, {"formats": {"int4": {"layout_version": "2"}}}],
)
def test_what_says_nothing_of_use_is_passed_over(said: Any, export: Path, tmp_path: Path) -> None:
    read_ours(changed(export, tmp_path / "out", lambda config: config.update(plugins=said)))


def test_checkpoints_without_the_block_are_read(export: Path, tmp_path: Path) -> None:
    read_ours(changed(export, tmp_path / "out", lambda config: config.pop("plugins")))


def test_no_words_of_a_file_are_passed_on_as_a_distribution(export: Path, tmp_path: Path) -> None:
    def odd(config: dict[str, Any]) -> None:
        config["plugins"]["formats"]["acme"] = {"distribution": "a; rm -rf /", "version": "0.1"}

    with pytest.raises(UnknownNameError, match="of a distribution that it does not name") as caught:
        read_ours(changed(export, tmp_path / "out", odd))
    assert "rm -rf" not in str(caught.value)
