"""The checkpoint source holds each tensor at the right time, and reads it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import initialization

from quark.errors import ConfigError
from quark.models.hf.converted_tensors import ConvertedTensors
from quark.models.hf.file_tensors import ReadTensor
from quark.models.hf.loading import load_model
from quark.models.hf.shards import check_shards
from quark.models.hf.skeleton import skeleton
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import BlockStarted, Event, listening
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import CheckpointSource
from quark.torch import LLMTemplate
from quark_devkit.small_models import run_config, saved, small_model
from quark_tiny_model import tiny_model_dir

CPU = torch.device("cpu")


def opened(directory: Path | None = None, scheme: str = "int4_wo_64") -> tuple[nn.Module, QuantPlan, CheckpointSource]:
    """Return the bundled checkpoint as a source that has read nothing yet."""
    path = directory or tiny_model_dir()
    model = skeleton(path, "auto", CPU)
    source = CheckpointSource(model, StoredTensors(model, check_shards(path), path), CPU)
    plan = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).plan(model)
    source.prepare(plan)
    return model, plan, source


def there(model: nn.Module) -> set[str]:
    """Return the names of the parameters that hold values."""
    return {name for name, p in model.named_parameters() if not p.is_meta}


def blocks_of(model: nn.Module, plan: QuantPlan) -> list[Block]:
    return decoder_blocks(model, plan.architecture)


def test_a_skeleton_holds_no_weight_and_has_the_buffers_and_dtypes_of_the_model() -> None:
    found, wanted = skeleton(tiny_model_dir(), "auto", CPU), load_model(tiny_model_dir())
    assert there(found) == set()
    assert {n: (p.dtype, p.shape) for n, p in found.named_parameters()} == {n: (p.dtype, p.shape) for n, p in wanted.named_parameters()}
    buffers = dict(found.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[n], b) for n, b in wanted.named_buffers())
    assert not found.training


def test_a_skeleton_draws_no_random_numbers_for_weights_that_will_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        raise AssertionError(f"random numbers for a {tensor.device} tensor of shape {list(tensor.shape)}")

    monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, "normal_", drawn)
    skeleton(tiny_model_dir(), "auto", CPU)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float17"):
        skeleton(tiny_model_dir(), "float17", CPU)


def test_a_block_has_its_tensors_from_its_loading_to_its_release_and_no_other_has() -> None:
    model, plan, source = opened()
    source.load(None)
    outside = there(model)
    assert "model.embed_tokens.weight" in outside
    assert not any(name.startswith("model.layers.") for name in outside)
    wanted = load_model(tiny_model_dir()).state_dict()
    for block in blocks_of(model, plan):
        source.load(block)
        inside = there(model) - outside
        assert inside == {name for name, _ in model.named_parameters() if name.startswith(f"{block.name}.")}
        assert all(torch.equal(model.get_parameter(name), wanted[name]) for name in inside)
        source.release(block)
        assert there(model) == outside


def test_the_buffers_of_a_block_are_released_with_it_but_for_those_that_no_file_holds() -> None:
    model, plan, source = opened()
    block = blocks_of(model, plan)[0]
    source.load(block)
    block.module.register_buffer("stored", torch.ones(2))
    block.module.register_buffer("computed", torch.ones(2), persistent=False)
    source.release(block)
    assert block.module.get_buffer("stored").is_meta
    assert block.module.get_buffer("computed").tolist() == [1, 1]


def test_tied_modules_share_what_is_read() -> None:
    model, _, source = opened()
    source.load(None)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_each_matrix_is_read_once_and_what_is_checked_beforehand_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, source = opened()
    read: Counter[str] = Counter()
    plain = ConvertedTensors.reading

    @contextmanager
    def counted(self: ConvertedTensors, device: torch.device) -> Iterator[ReadTensor]:
        with plain(self, device) as tensor_of:

            def count(name: str, dtype: torch.dtype) -> torch.Tensor:
                read[name] += 1
                return tensor_of(name, dtype)

            yield count

    monkeypatch.setattr(ConvertedTensors, "reading", counted)
    source.load(None)
    for block in blocks_of(model, plan):
        source.load(block)
        source.release(block)
    shapes = {name: shape for shard in check_shards(tiny_model_dir()) for name, (_, shape) in shard.tensors.items()}
    assert read == Counter({name: 2 if len(shape) < 2 and ".layers." in name else 1 for name, shape in shapes.items()})


def test_what_is_foreseen_has_the_scales_that_calibration_finds_and_no_values() -> None:
    model, plan, _ = opened(scheme="fp8")
    found = quantized_skeleton(model, plan)
    wanted = ModelQuantizer(plan.config).quantize_model(load_model(tiny_model_dir()), [torch.arange(3, 40)[None]])
    facts = {name: (t.shape, t.dtype) for name, t in found.state_dict().items()}
    assert facts == {name: (t.shape, t.dtype) for name, t in wanted.state_dict().items()}
    assert all(t.is_meta for t in found.state_dict().values())
    assert all(not isinstance(m, type(found.get_submodule("model.layers.0.mlp.up_proj"))) for m in model.modules())


def test_what_is_foreseen_ties_the_parameters_that_the_model_ties() -> None:
    """Equal biases of layers are no tied tensors.

    A layout that took them for tied tensors would write only one of them.
    """
    model = small_model().to("meta")
    found = quantized_skeleton(model, ModelQuantizer(run_config("int4_wo_32")).plan(model))
    assert sum(name.endswith(".bias") for name, _ in found.named_parameters()) == 2 * 7
    assert dict(found.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_what_is_foreseen_shares_modules_where_the_model_does_and_leaves_the_model_as_it_is() -> None:
    model, plan, _ = opened()
    twice = nn.LayerNorm(4, device="meta")
    model.add_module("one", twice)
    model.add_module("other", twice)
    before = [(name, id(m), id(m._parameters.get("weight"))) for name, m in model.named_modules(remove_duplicate=False)]
    found = quantized_skeleton(model, plan)
    assert found.get_submodule("one") is found.get_submodule("other")
    assert found.get_submodule("one") is not twice
    assert not {id(m) for m in found.modules()} & {id(m) for m in model.modules()}
    assert [(name, id(m), id(m._parameters.get("weight"))) for name, m in model.named_modules(remove_duplicate=False)] == before
    assert not hasattr(model, "quark_plan")


def test_a_run_that_is_resumed_where_it_is_finished_returns_the_plan_and_does_nothing(tmp_path: Path) -> None:
    source, heard = saved(tmp_path / "model"), list[Event]()
    resumed = partial(quantize_checkpoint, source, tmp_path / "out", run_config("int4_wo_32"), resume=True)
    plan = resumed()
    with listening(heard.append):
        assert resumed().rows == plan.rows
    assert not any(isinstance(event, BlockStarted) for event in heard)
