"""Rotation on every scheme, and algorithms together.

Nothing crashes, the order of naming is nothing, senseless lists are refused.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quark
import quark_tiny_model as tiny
from quark.config.algorithm import AlgoConfig
from quark.errors import ConfigError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_algos.rotation.config import RotationConfig

from .runs import off_grid, same

pytestmark = pytest.mark.thorough

SCHEMES = [n for n in quark.schemes().names() if quark.schemes().load_config(n)().weight is not None]
SOME = ["int4_wo_32", "int8", "fp8", "mxfp4", "nvfp4", "mx6"]
LISTS = [("rotation", "smoothquant", "gptq"), ("rotation", "awq", "qronos"), ("rotation", "gptq"), ("awq", "gptq")]
BLOCKS = {f"model.layers.{i}" for i in range(2)}


@cache
def float_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The bundled model without its last block; to be copied, not changed."""
    return tiny.tiny_model(dtype, len(BLOCKS))


@cache
def data() -> list[Tensor]:
    return tiny.calibration_batches(2, 64)


def settings(names: tuple[str, ...]) -> list[AlgoConfig]:
    """The documented ones; rotations with R2, and applied whether they do good or not."""
    made = LLMTemplate.get("llama").get_config("int8", algorithm=list(names)).algo_config or []
    return [attrs.evolve(one, r2=True, preset="reference") if isinstance(one, RotationConfig) else one for one in made]


def run(algorithms: list[AlgoConfig], scheme: str, dtype: torch.dtype = torch.float32, batches: Any = None) -> nn.Module:
    config = LLMTemplate.get("llama").get_config(scheme)
    config.algo_config = algorithms or None
    return ModelQuantizer(config).quantize_model(copy.deepcopy(float_model(dtype)), data() if batches is None else batches)


@lru_cache(maxsize=6)
def quantized(names: tuple[str, ...], scheme: str) -> nn.Module:
    """Not to be changed."""
    return run(settings(names), scheme)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x).logits for x in data()])


@cache
def float_logits() -> Tensor:
    return logits(float_model())


def error(model: nn.Module) -> float:
    expected = float_logits()
    return float((logits(model) - expected).square().mean() / expected.square().mean())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_can_be_rotated(scheme: str) -> None:
    """The weights that are rounded are others, and the error of the whole is of the size it was.

    A wrong rotation makes it about 1.
    """
    model, plain = quantized(("rotation",), scheme), quantized((), scheme)
    weights = [m.get_submodule("model.layers.1.mlp.down_proj").get_parameter("weight") for m in (model, plain)]
    assert float((weights[0] - weights[1]).abs().max()) > 0.1 * float(weights[1].abs().max())
    assert {n: (f["r1"], f["r2"]) for n, f in model.quark_report.transformed.items()} == dict.fromkeys(BLOCKS, (True, True))
    assert off_grid(model) == []
    assert error(model) < 2 * error(plain) < (0.06 if scheme.startswith("int2") else 0.04)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("names", LISTS, ids="+".join)
@pytest.mark.parametrize("scheme", SOME)
def test_algorithms_compose_and_each_does_its_work(names: tuple[str, ...], scheme: str) -> None:
    model = quantized(names, scheme)
    metrics: dict[str, Any] = model.quark_report.transformed
    assert off_grid(model) == []
    assert error(model) < 2 * error(quantized((), scheme))
    assert {r.algorithm for r in model.quark_plan.quantized} == {names[-1]}
    assert {n for n, f in metrics.items() if f.get("r1") and f.get("r2")} == (BLOCKS if "rotation" in names else set())
    scaled = {n for n, f in metrics.items() if "applied" in f}
    assert scaled == (BLOCKS if {"awq", "smoothquant"} & set(names) else set())
    assert all("damping" in model.quark_report.layers[r.name] for r in model.quark_plan.quantized)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("names", "scheme"), list(zip(LISTS, SOME, strict=False)), ids=str)
def test_the_order_of_naming_does_not_matter(names: tuple[str, ...], scheme: str) -> None:
    for order in {names[::-1], (*names[1:], names[0])}:
        assert same(run(settings(order), scheme), quantized(names, scheme)), order


@pytest.mark.parametrize(("names", "scheme"), [(LISTS[0], "int8"), (LISTS[1], "mxfp4"), (LISTS[3], "int4_wo_32")], ids=str)
def test_what_is_exported_reloads_to_the_last_bit(names: tuple[str, ...], scheme: str, tmp_path: Path) -> None:
    model = run(settings(names), scheme, torch.bfloat16)
    export_safetensors(model, tmp_path / "out")
    again = import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")
    assert torch.equal(logits(again), logits(model))


def unread() -> Iterator[Tensor]:
    raise AssertionError("data are read though the list of algorithms is refused")
    yield torch.zeros(0)


ROUNDINGS, SCALINGS = ("gptq", "gptaq", "qronos"), ("awq", "smoothquant", "autosmoothquant")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        *((pair, "both choose the codes of weights") for pair in itertools.combinations(ROUNDINGS, 2)),
        *((pair, "have the same role") for pair in itertools.combinations(SCALINGS, 2)),
        (("rotation", "gptq", "awq", "qronos"), "'gptq' and 'qronos' both choose the codes"),
        *(((name, name), "is named twice") for name in (*ROUNDINGS, *SCALINGS, "rotation")),
        (("awq", "gptq", "awq"), "'awq' is named twice"),
    ],
)
def test_senseless_lists_are_refused_with_a_reason_before_any_work(names: tuple[str, ...], words: str) -> None:
    model = copy.deepcopy(float_model())
    kept = dict(model.named_parameters())
    config = LLMTemplate.get("llama").get_config("int8")
    config.algo_config = [one for name in names for one in settings((name,))]
    with pytest.raises(ConfigError, match=words):
        ModelQuantizer(config).quantize_model(model, unread())
    assert all(p is kept[n] for n, p in model.named_parameters())


def user_stream_settings(**changes: Any) -> RotationConfig:
    """Return rotation settings with the architecture's entries in another order.

    ``changes`` go into one entry.
    """
    (made,) = settings(("rotation",))
    assert isinstance(made, RotationConfig)
    entries = json.loads(json.dumps(made.scaling_layers))
    for entry in (entry for part in entries.values() for entry in part):
        entry["next_modules"].reverse()
    entries["middle_layers"][0] |= changes
    return attrs.evolve(made, scaling_layers=entries)


def test_rotations_of_a_user_stream_are_run_and_reloaded(tmp_path: Path) -> None:
    model = run([user_stream_settings()], "int4_wo_32")
    assert same(model, quantized(("rotation",), "int4_wo_32"))
    export_safetensors(model, tmp_path / "out")
    again = import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")
    assert torch.equal(logits(again), logits(model))


def test_user_streams_that_leave_a_layer_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.self_attn\.[kv]_proj"):
        run([user_stream_settings(next_modules=["model.layers.layer_id.self_attn.q_proj"])], "int4_wo_32")


def test_a_family_without_a_template_is_rotated_by_a_user_stream() -> None:
    model = copy.deepcopy(float_model())
    model.config.model_type = "nobody_knows"
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    config.algo_config = [attrs.evolve(user_stream_settings(), r2=False)]
    known = run(config.algo_config, "int4_wo_32")
    assert same(ModelQuantizer(config).quantize_model(model), known)
    assert not same(known, quantized((), "int4_wo_32"))


@pytest.mark.parametrize("names", [("gptq",), ("smoothquant",), ("awq", "gptq"), ("qronos",)], ids="+".join)
def test_a_bfloat16_model_computes_its_forwards_in_bfloat16(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In memory and from disk: weights, inputs, queries; what algorithms compute besides is float32."""
    computed: Counter[frozenset[torch.dtype]] = Counter()
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def recording(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*tensors: Any, **more: Any) -> Tensor:
            computed[frozenset(tensor.dtype for tensor in tensors if isinstance(tensor, Tensor))] += 1
            return function(*tensors, **more)

        return recorded

    monkeypatch.setattr(functional, "linear", recording(linear))
    monkeypatch.setattr(functional, "scaled_dot_product_attention", recording(attention))
    config = LLMTemplate.get("llama").get_config("int4_wo_32" if names != ("smoothquant",) else "int8")
    config.algo_config = settings(names)
    model = float_model(torch.bfloat16)
    ModelQuantizer(config).quantize_model(copy.deepcopy(model), data())
    model.save_pretrained(tmp_path / "float")  # type: ignore[operator]
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", config, data())
    assert set(computed) == {frozenset({torch.bfloat16})}
    assert computed.total() >= 2 * len(BLOCKS) * len(data()) * 8  # 7 layers and attention, in two runs
