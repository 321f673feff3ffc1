"""Block inputs in files: the same values, less memory, and nothing left in the directory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quark_tiny_model as tiny
from quark.calibration.spilled_inputs import LEAST_SPILLED, SpilledInputs
from quark.errors import ConfigError
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer
from quark.torch import LLMTemplate


class Waiting:
    """A stand-in for a forward."""


def resident() -> int:
    """Return the bytes of mapped files in this process's memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def large(seed: int = 0) -> Tensor:
    return torch.randn(64, LEAST_SPILLED // 16, generator=torch.Generator().manual_seed(seed))


def in_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().resizable()


def test_values_and_dtypes_stay_and_the_storage_becomes_that_of_a_file(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = (8 * large()).to(dtype)
        before = x.clone()
        SpilledInputs(tmp_path, 0).hold(Waiting(), ((x,), {"again": [x]}))
        assert not in_memory(x)
        assert torch.equal(x, before)
        x.add_(1)
        assert torch.equal(x, before + 1)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_used_as_far_as_allowed_and_again_when_a_forward_has_gone_on(tmp_path: Path) -> None:
    first, second = Waiting(), Waiting()
    spilled = SpilledInputs(tmp_path, large().nbytes)
    x, y, z = large(), large(), large()
    spilled.hold(first, x)
    spilled.hold(second, y)
    spilled.hold(first, z)
    assert [in_memory(t) for t in (x, y, z)] == [True, False, True]


def test_views_and_small_tensors_stay_in_memory(tmp_path: Path) -> None:
    whole, small = large(), torch.ones(4)
    view = whole[1:]
    spilled = SpilledInputs(tmp_path, 0)
    spilled.hold(Waiting(), {"view": view, "small": small, "transposed": large().t(), "none": None})
    assert in_memory(view)
    assert in_memory(small)
    whole[1] = 0
    assert not view[0].any()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_pages_leave_the_process_when_a_forward_waits_again_and_when_the_tensor_goes(tmp_path: Path) -> None:
    forward, spilled = Waiting(), SpilledInputs(tmp_path, 0)
    x = torch.ones(4 << 20)  # 16 MiB
    spilled.hold(forward, x)
    start = resident()
    assert float(x.sum()) == len(x)
    assert resident() - start > x.nbytes // 2
    spilled.leave(forward)
    assert resident() - start < x.nbytes // 8
    assert float(x.sum()) == len(x)
    size = x.nbytes
    del x
    gc.collect()
    assert resident() - start < size // 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("algorithm", "memory"), [("gptq", 0), ("gptq", None), ("gptaq", 0), ("awq", None)])
def test_a_quantized_model_is_the_same_with_its_inputs_in_files(
    algorithm: str, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    held: list[int] = []
    plain = SpilledInputs._spill
    monkeypatch.setattr(SpilledInputs, "_spill", lambda self, tensor: (held.append(tensor.nbytes), plain(self, tensor))[1])
    if memory is None:  # one pass, in which forwards wait inside of a block too
        monkeypatch.setattr(
            "quark.runs.started_run._spilled", lambda config: SpilledInputs(tmp_path, 0) if config.spill_directory else None
        )
    for directory in (None, str(tmp_path)):
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=[algorithm])
        config.activation_memory, config.spill_directory = memory, directory
        assert not held
        model = ModelQuantizer(config).quantize_model(load_model(tiny.tiny_model_dir()), tiny.calibration_batches(4, 256))
        states.append(model.state_dict())
    assert held
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_a_directory_that_is_not_there_is_refused_before_any_weight_is_changed(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    config.spill_directory = str(tmp_path / "missing")
    model = load_model(tiny.tiny_model_dir())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"spill_directory=.*missing.*not a directory"):
        ModelQuantizer(config).quantize_model(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
