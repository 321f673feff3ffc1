"""The functions by which AMD Quark's scripts prepare models and data return what the scripts expect."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import CheckpointError, UnsupportedError
from quark.torch import ModelQuantizer
from quark.torch.utils import TPDeviceManager, getattr_recursive, setattr_recursive
from quark.torch.utils.llm import (
    check_compatibility_before_quantization,
    create_model_skeleton,
    get_calib_dataloader,
    get_model,
    get_model_type,
    get_tokenizer,
    get_wikitext2,
    maybe_save_preprocessors,
    preprocess_for_quantization,
    save_model,
)
from quark_tiny_model import held_out_text, tiny_model, tiny_model_dir, tiny_template, tiny_tokenizer


def test_a_model_is_loaded_as_the_script_asks() -> None:
    model, dtype = get_model(tiny_model_dir(), "float32", "cuda", attn_implementation="sdpa", trust_remote_code=True)
    assert dtype is torch.float32
    assert not model.training
    assert (get_model_type(model), model.config._attn_implementation) == ("llama", "sdpa")  # type: ignore[union-attr]
    expected = tiny_model().state_dict()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())


def test_several_devices_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = get_model(tiny_model_dir(), device="cpu", multi_gpu="auto")
    assert next(model.parameters()).device.type == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for count, says in ((1, "multi_device has no effect: this machine has one accelerator"), (8, "torchrun --nproc-per-node 8 -m quark")):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        ModelQuantizer(tiny_template().get_config("int8"), multi_device=True)
        assert says in caplog.records[-1].message
    assert caplog.records[0].message.startswith("multi_gpu")


def test_what_a_script_cannot_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="is not a local directory, and loading it from the Hub failed"):
        get_model(str(tmp_path / "nowhere"))
    from quark.torch.export.api import _move_quantizer_to_dict  # type: ignore[attr-defined]

    with pytest.raises(UnsupportedError, match="tensor-parallel evaluation is not supported"):
        _move_quantizer_to_dict(None)
    with pytest.raises(UnsupportedError, match="quark evaluate --backend vllm"):
        TPDeviceManager.tp_mesh_init()


def test_a_tokenizer_and_a_processor_are_copied_beside_an_export(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model_dir(), source / "inner")
    (source / "inner" / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    maybe_save_preprocessors(source, tmp_path / "a" / "out", "inner")
    copied = {path.name for path in (tmp_path / "a" / "out").iterdir()}
    small = {"generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert copied == small | {"PROVENANCE.md", "held_out.txt"}


def test_the_tokenizer_can_pad() -> None:
    tokenizer = get_tokenizer(str(tiny_model_dir()), max_seq_len=10)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token is not None


def test_a_quantized_model_is_not_fit_for_quantization() -> None:
    model = tiny_model()
    preprocess_for_quantization(model)
    assert check_compatibility_before_quantization(model)
    model.config.quantization_config = {}  # type: ignore[union-attr]
    assert not check_compatibility_before_quantization(model)
    with pytest.raises(CheckpointError, match="already quantized"):
        check_compatibility_before_quantization(model, raise_on_error=True)


def test_a_skeleton_has_no_weights_and_a_saved_model_has(tmp_path: Path) -> None:
    assert all(p.is_meta for p in create_model_skeleton(tiny_model_dir()).parameters())
    save_model(tiny_model(), tiny_tokenizer(), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "tokenizer.json").is_file()


def test_names_of_amd_quark_give_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    text = held_out_text()
    rows = [{"text": text[300 * i : 300 * i + 40 * (i + 1)]} for i in range(8)]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    tokenizer = get_tokenizer(tiny_model_dir())
    one = [batch.shape[1] for batch in get_calib_dataloader("pileval", tokenizer=tokenizer, num_calib_data=8, seqlen=64, device="cuda")]
    assert len(one) == 8
    assert len(set(one)) > 1
    padded = list(get_calib_dataloader(dataset_name="pileval", tokenizer=tokenizer, batch_size=4, num_calib_data=8, seqlen=64))
    assert padded[0]["input_ids"].shape[0] == 4
    assert padded[0]["attention_mask"].sum(1).tolist() == one[:4]
    packed = get_calib_dataloader("pileval_for_awq_benchmark", tokenizer=tokenizer, num_calib_data=4, seqlen=16)
    assert [batch.shape for batch in packed] == [(1, 16)] * 4
    assert get_wikitext2(tokenizer, 3, 16).shape == (3, 16)
    with pytest.raises(UnsupportedError, match="ScienceQA has images"):
        get_calib_dataloader("ScienceQA", tokenizer=tokenizer)


def test_a_dataloader_calibrates(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(held_out_text()[:4000])
    model: Any = tiny_model()
    data = get_calib_dataloader(str(tmp_path / "a.txt"), tokenizer=get_tokenizer(tiny_model_dir()), num_calib_data=4, seqlen=32)
    from quark_tiny_model import tiny_template

    quantized = ModelQuantizer(tiny_template().get_config("fp8")).quantize_model(model, data)
    assert quantized.quark_quantized


def test_attributes_by_path() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    replacement = nn.Identity()
    setattr_recursive(model, "0.0", replacement)
    assert getattr_recursive(model, "0.0") is replacement
    assert getattr_recursive(model, "") is model
