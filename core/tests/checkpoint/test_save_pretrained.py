"""save_pretrained of a quantized model writes its checkpoint, or an error names the right function."""

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.config.model import QConfig
from quark.errors import OutputError, UnsupportedError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_template, tiny_tokenizer


@pytest.fixture
def model() -> Any:
    """A model with static activation scales, which a float checkpoint would lose."""
    return ModelQuantizer(tiny_template().get_config("fp8")).quantize_model(tiny_model(), calibration_batches(1, 32))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_it_writes_what_an_export_writes_and_the_model_is_read_back(model: Any, tmp_path: Path) -> None:
    export_safetensors(model, tmp_path / "export")
    model.save_pretrained(tmp_path / "saved")
    assert files(tmp_path / "saved") == files(tmp_path / "export")
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_what_is_read_from_an_export_is_saved_as_it_was(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(str(tmp_path / "first"))
    again: Any = import_model_from_safetensors(tiny_model(), str(tmp_path / "first"))
    again.save_pretrained(tmp_path / "second", max_shard_size="50GB", safe_serialization=True, save_compressed=True, state_dict=None)
    assert files(tmp_path / "second")["model.safetensors"] == files(tmp_path / "first")["model.safetensors"]


def test_a_copy_and_what_is_unpickled_save_themselves(model: Any, tmp_path: Path) -> None:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for name, other in {"copied": copy.deepcopy(model), "pickled": torch.load(file, weights_only=False)}.items():
        with torch.no_grad():
            other.model.norm.weight.fill_(3.0)
        other.save_pretrained(tmp_path / name)
        again = import_model_from_safetensors(tiny_model(), str(tmp_path / name))
        assert bool((again.get_parameter("model.norm.weight") == 3).all())
    assert not bool((model.model.norm.weight == 3).any())


def test_it_does_not_keep_the_model_in_memory(model: Any) -> None:
    left = weakref.ref(copy.deepcopy(model))
    gc.collect()
    assert left() is None
    other = copy.deepcopy(model)
    left = weakref.ref(other)
    gc.disable()
    try:
        del other
        assert left() is None
    finally:
        gc.enable()


def test_the_hub_gets_the_checkpoint(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "save_pretrained", lambda *_, **__: pytest.fail("the rounded weights were written as floats"))
    model.save_pretrained(tmp_path / "out", max_shard_size="5GB")  # as push_to_hub calls it
    assert b'"quant_method": "quark"' in files(tmp_path / "out")["config.json"]


def test_a_tokenizer_may_be_there_already_and_another_process_writes_nothing(model: Any, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    before = files(tmp_path / "out")
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert files(tmp_path / "out") == before
    model.save_pretrained(tmp_path / "out")
    assert before.items() <= files(tmp_path / "out").items()
    with pytest.raises(OutputError, match="overwrite"):
        model.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [{"state_dict": {}}, {"push_to_hub": True}, {"variant": "fp8"}, {"safe_serialization": False}, {"distributed_checkpoint": True}],
)
def test_options_that_ask_for_another_result_are_refused_by_name(model: Any, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"does not support {next(iter(options))}. .* use quark.checkpoint.export_safetensors"):
        model.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_from_pretrained_has_loaded_says_how_it_is_written_again(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    with pytest.raises(UnsupportedError, match=r"first', and cannot be saved again\. .*import_model_from_safetensors"):
        loaded.save_pretrained(tmp_path / "second")


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "float")
    assert "model.safetensors" in files(tmp_path / "float")
    config = QConfig(tiny_template().get_config("int4_wo_32").global_quant_config)
    assert not hasattr(ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(64, 64))), "save_pretrained")
