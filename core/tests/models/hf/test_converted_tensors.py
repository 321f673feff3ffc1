"""`quark.models.hf.converted_tensors`: applied converters, and tensors that are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quark.errors import CheckpointError, ConfigError
from quark.models.hf.converted_tensors import ConvertedTensors
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.shards import check_shards
from quark.torch.quantization.weight_convert import Chunk, Concatenate, ConversionOps, Transpose, WeightConverter

CPU = torch.device("cpu")
QKV = WeightConverter("qkv.weight", ["q.weight", "k.weight"], operations=[Chunk()])
STORED = {"a.qkv.weight": torch.arange(8.0).view(4, 2), "a.o.weight": torch.ones(2, 2)}


def opened(tensors: dict[str, Tensor], converters: Sequence[Any], places: set[str], directory: Path) -> ConvertedTensors:
    save_file(tensors, directory / "model.safetensors")
    return ConvertedTensors(FileTensors(check_shards(directory)), directory, converters, places.__contains__)


def read(tensors: ConvertedTensors) -> dict[str, Tensor]:
    with tensors.reading(CPU) as tensor_of:
        return {name: tensor_of(name, torch.float32).clone() for name in tensors.meta}


def test_tensors_without_a_place_in_the_model_are_converted(tmp_path: Path) -> None:
    tensors = opened(STORED, [QKV], {"a.q.weight", "a.k.weight", "a.o.weight"}, tmp_path)
    assert {name: tuple(t.shape) for name, t in tensors.meta.items()} == {"a.o.weight": (2, 2), "a.q.weight": (2, 2), "a.k.weight": (2, 2)}
    assert all(t.is_meta for t in tensors.meta.values())
    assert tensors.sources("a.k.weight") == ["a.qkv.weight"]
    values = read(tensors)
    assert torch.equal(torch.cat([values["a.q.weight"], values["a.k.weight"]]), STORED["a.qkv.weight"])


def test_a_tensor_can_be_read_twice(tmp_path: Path) -> None:
    tensors = opened(STORED, [QKV], {"a.q.weight", "a.k.weight", "a.o.weight"}, tmp_path)
    with tensors.reading(CPU) as tensor_of:
        assert torch.equal(tensor_of("a.q.weight", torch.float32), tensor_of("a.q.weight", torch.float32))


def test_tensors_with_a_place_in_the_model_are_read_as_they_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quark"):
        tensors = opened(STORED, [QKV], {"a.qkv.weight", "a.o.weight"}, tmp_path)
    assert {name: t.tolist() for name, t in read(tensors).items()} == {name: t.tolist() for name, t in STORED.items()}
    assert "is not applied: the model has a place for the tensors as they are stored" in caplog.text


def test_a_converter_that_keeps_the_name_changes_the_values(tmp_path: Path) -> None:
    transposed = WeightConverter("qkv.weight", "qkv.weight", operations=[Transpose()])
    tensors = opened(STORED, [transposed], {"a.qkv.weight", "a.o.weight"}, tmp_path)
    assert torch.equal(read(tensors)["a.qkv.weight"], STORED["a.qkv.weight"].t())


def test_several_tensors_are_joined(tmp_path: Path) -> None:
    joined = WeightConverter(["q.weight", "k.weight"], "qk.weight", operations=[Concatenate()])
    parts = {"q.weight": torch.zeros(2, 2), "k.weight": torch.ones(2, 2)}
    assert torch.equal(read(opened(parts, [joined], {"qk.weight"}, tmp_path))["qk.weight"], torch.cat([*parts.values()]))


def test_a_converter_that_matches_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quark"):
        opened(STORED, [WeightConverter("wqkv", ["q", "k"], operations=[Chunk()])], {*STORED}, tmp_path)
    assert "is not applied: no stored tensor has such a name" in caplog.text


def test_results_without_a_place_and_incomplete_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"makes 'a\.q\.weight' from a\.qkv\.weight .* no such tensor"):
        opened(STORED, [QKV], {"a.o.weight"}, tmp_path)
    joined = WeightConverter(["o.weight", "p.weight"], "op.weight", operations=[Concatenate()])
    with pytest.raises(CheckpointError, match="needs all of its sources"):
        opened(STORED, [joined], {"a.op.weight", "a.qkv.weight"}, tmp_path)


def test_a_result_that_the_checkpoint_has_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"makes 'a\.q\.weight', which .* has already"):
        opened(STORED | {"a.q.weight": torch.ones(2, 2)}, [QKV], {"a.q.weight", "a.k.weight", "a.o.weight"}, tmp_path)


def test_a_converter_that_does_not_fit_is_refused_with_the_names_of_the_tensors(tmp_path: Path) -> None:
    uneven = WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], operations=[Chunk()])
    with pytest.raises(ConfigError, match=r"cannot convert a\.qkv\.weight .* into 3 parts"):
        opened(STORED, [uneven], {"a.o.weight"}, tmp_path)


def test_an_operation_may_look_at_the_model_as_those_of_transformers_do(tmp_path: Path) -> None:
    """transformers' own ``Split`` takes the lengths of the parts from the model's parameters."""
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({leaf: torch.nn.Linear(2, n, bias=False) for leaf, n in (("q", 3), ("k", 1))})})

    class SplitLikeTheModel(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, full_layer_name: str, model: Any, **_: Any) -> Any:
            names = [full_layer_name.replace(target_patterns[0], target) for target in target_patterns]
            sizes = [model.get_parameter(name).shape[0] for name in names]
            return dict(zip(target_patterns, input_dict[source_patterns[0]].split(sizes), strict=True))

    converter = WeightConverter("qkv.weight", ["q.weight", "k.weight"], operations=[SplitLikeTheModel()])
    save_file({"a.qkv.weight": STORED["a.qkv.weight"]}, tmp_path / "model.safetensors")
    places = dict(model.named_parameters())
    tensors = ConvertedTensors(FileTensors(check_shards(tmp_path)), tmp_path, [converter], places.__contains__, model)
    assert {name: t.shape for name, t in read(tensors).items()} == {name: p.shape for name, p in places.items()}
