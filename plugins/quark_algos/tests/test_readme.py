"""The README's code runs as it stands, and its tables name every setting, with the numbers that are used."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.config.model import QConfig
from quark.plugins import AlgorithmRecord
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig, QronosConfig
from quark_algos.gptq.damping import SingularError, factor

from .runs import QRONOS, quantized, quantized_once, same

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
FIRST, OWN = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, module: types.ModuleType) -> dict[str, object]:
    """Execute a block as a module of its own."""
    exec(compile(code, "README.md", "exec"), module.__dict__)
    return module.__dict__


def test_the_first_example_runs_and_its_figures_are_those_named_there() -> None:
    *_, last = FIRST.strip().splitlines()
    found = run(FIRST, types.ModuleType("readme"))["model"].quark_report.layers["model.layers.0.mlp.down_proj"]
    assert list(found) == last.partition("# ")[2].split(", ")


def test_the_algorithm_of_one_s_own_is_registered_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_quant.silent")
    monkeypatch.setitem(sys.modules, "my_quant", types.ModuleType("my_quant"))
    monkeypatch.setitem(sys.modules, "my_quant.silent", module)
    found = run(OWN, module)
    (record,) = found["quark_register_algorithms"]()
    assert isinstance(record, AlgorithmRecord)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].bias[7] = -1e3
    layer = LLMTemplate.get("llama").get_config("int4_wo_64").global_quant_config
    data = [torch.randn(5, 64, generator=torch.Generator().manual_seed(0))]
    quark.algorithms().register(record)
    try:
        config = QConfig(global_quant_config=layer, algo_config=[found["DropSilentConfig"]()])
        ModelQuantizer(config).quantize_model(model, data)
    finally:
        quark.algorithms().unregister(record.name)
    metrics = model.quark_report.layers
    silent = (torch.relu(model[0](data[0])) == 0).all(0)
    assert silent[7]
    assert (metrics["0"]["silent"], metrics["2"]["silent"]) == (0, int(silent.sum()))
    assert (model[2].weight[:, silent] == 0).all()
    assert (model[2].weight[:, ~silent] != 0).any(0).all()


def test_every_setting_is_explained_for_every_class_that_has_it() -> None:
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*)\|$", README, flags=re.MULTILINE)
    explained = {(re.findall(r"`(\w+)`", field)[0], who.strip()) for field, who, _ in rows if "`" in field}
    without_effect = {name for name, _ in re.findall(r"^\| (?:[^|`]*)`(\w+)` \| ([^|]*)\|$", README, flags=re.MULTILINE)}
    for who, settings in {"GPTQ": GPTQConfig, "GPTAQ": GPTAQConfig, "Qronos": QronosConfig}.items():
        named = {field for field, classes in explained if classes == "all" or who in classes.split(", ")} | without_effect
        assert {a.name for a in attrs.fields(settings)} - {"name"} <= named, who


def number(before: str, after: str = "") -> float:
    """The number that the README names between two texts."""
    (found,) = re.findall(re.escape(before) + r"(\d+(?:\.\d+)?)" + re.escape(after), " ".join(README.split()))
    return float(found)


def test_the_preset_best_is_what_the_readme_says_it_is() -> None:
    least, share = number("If you do not set λ, it is ", " times the mean"), number("Qronos uses at most a share of ")
    for settings in (GPTQConfig(), GPTAQConfig(), QRONOS):
        assert {f["damping"] for f in quantized_once(settings).quark_report.layers.values()} == {least}
    assert same(quantized_once(QRONOS), quantized(attrs.evolve(QRONOS, correction_share=share)))
    assert not same(quantized_once(QRONOS), quantized(attrs.evolve(QRONOS, correction_share=share / 10)))


def test_a_hopeless_moment_is_tried_as_often_as_the_readme_says() -> None:
    (word,) = re.findall(r"up to (\w+) attempts", " ".join(README.split()))
    attempts = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"].index(word)
    last = 0.01 * 10 ** (attempts - 1)

    def correlated(by: float) -> Tensor:
        """Needs a damping above ``by − 1``."""
        return torch.tensor([[1.0, by], [by, 1.0]])

    assert factor(correlated(1 + last / 2), 0.01).attempts == attempts
    with pytest.raises(SingularError, match=f"damping {last:g}"):
        factor(correlated(1 + 2 * last), 0.01)
