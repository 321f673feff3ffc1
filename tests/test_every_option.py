"""Laws of every option of every algorithm: what was asked for is done, and what is written is what was done."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import pytest

import quark
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import algo_config_from_dict
from quark.errors import QuarkError
from quark.plugins.options import REQUIRED, Option, settings_options
from quark.runs.run import plan_run
from quark.torch import LLMTemplate, ModelQuantizer
from quark_devkit.option_effects import others
from quark_tiny_model import calibration_batches, tiny_model

FIELDS: dict[str, Any] = {"scheme": "int4_wa_64", "kv_cache_scheme": "fp8", "kv_cache_post_rope": True}
"""Something to do for every option: R3 rotates keys that are quantized behind the rotary embedding."""


def options_of(algorithm: str) -> list[Option]:
    return settings_options(quark.algorithms().load_config(algorithm))


CASES = [(algorithm, option.name) for algorithm in quark.algorithms().names() for option in options_of(algorithm)]


def config_of(algorithm: str, **options: Any) -> QConfig:
    return LLMTemplate.get("llama").get_config(algorithm=algorithm, algorithm_options={algorithm: options}, **FIELDS)


@cache
def settings_of_a_run(algorithm: str, options: tuple[tuple[str, Any], ...]) -> AlgoConfig:
    """The settings in the plan of a run, which its checkpoint states."""
    planned = plan_run(tiny_model(blocks=1), config_of(algorithm, **dict(options)))
    (settings,) = planned.plan.config.algo_config or []
    return settings


def accepted(algorithm: str, name: str) -> Iterator[tuple[Mapping[str, Any], AlgoConfig]]:
    """Values of an option that are accepted, the default among them, with the settings of a run."""
    (option,) = (option for option in options_of(algorithm) if option.name == name)
    derived = config_of(algorithm).algo_config
    assert derived
    present = getattr(derived[0], name)
    plain = float(present) if isinstance(present, float) else present
    for value in ([] if present is REQUIRED else [plain], others(option, present)):
        for one in value:
            options = {**dict(option.note.beside), name: one}
            try:
                yield options, settings_of_a_run(algorithm, tuple(options.items()))
            except (QuarkError, TypeError):  # refused, or a value that cannot be a key of the cache
                continue


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_a_value_that_is_given_reaches_the_algorithm_and_the_checkpoint_as_it_is(algorithm: str, name: str) -> None:
    cases = list(accepted(algorithm, name))
    for options, settings in cases:
        for option, value in options.items():
            if value is None or (algorithm, option) == ("rotation", "online_config"):
                continue  # stands for what a run finds
            assert getattr(settings, option) == value, options
            assert settings.to_dict().get(option, attrs.fields_dict(type(settings))[option].default) == value, options
    assert cases or name in ("scaling_layers", "inside_layer_modules", "online_config", "train_smooth")


@pytest.mark.parametrize("algorithm", quark.algorithms().names())
def test_settings_of_a_run_and_those_that_are_read_back_resolve_to_themselves(algorithm: str) -> None:
    settings = settings_of_a_run(algorithm, ())
    assert settings.resolved().to_dict() == settings.to_dict()
    assert algo_config_from_dict(settings.to_dict()).resolved().to_dict() == settings.to_dict()


VALUES = {
    "alpha": (0.3, 0.7),
    "scale_clamp_min": (3.0, 6.0),
    "correction_share": (0.2, 0.4),
    "lr": (0.02, 0.03),
    "norm_lr": (0.004, 0.01),
    "minmax_lr": (0.01, 0.03),
}
"""Values of options of which twice and three times as much as the default do not make a difference."""
BESIDE: dict[str, dict[str, Any]] = {"smoothquant": {"preset": "reference"}, "autoround": {"iters": 20}, "tuning": {"lr": 0.1}}
"""Options with which others make a difference, and soon."""


def numbers() -> Iterator[tuple[str, Option, tuple[float, ...]]]:
    """Every option that is a number, with two values beside its default."""
    for algorithm in quark.algorithms().names():
        for option in options_of(algorithm):
            is_number = isinstance(option.default, float) or float in typing.get_args(option.type)
            if is_number and not option.note.is_cost_only:
                default = option.default or 0.0
                yield algorithm, option, VALUES.get(option.name) or (2 * default, 3 * default)


def result(algorithm: str, options: Mapping[str, Any]) -> bytes:
    quantizer = ModelQuantizer(config_of(algorithm, **{**BESIDE.get(algorithm, {}), **options}))
    quantized = quantizer.quantize_model(tiny_model(blocks=1), calibration_batches(4, 64))
    return b"".join(tensor.detach().float().numpy().tobytes() for tensor in quantized.state_dict().values())


NUMBERS = [
    pytest.param(*row, id=f"{row[0]}-{row[1].name}", marks=pytest.mark.thorough if row[0] == "autoround" else ()) for row in numbers()
]


@pytest.mark.parametrize(("algorithm", "option", "values"), NUMBERS)
def test_numbers_that_are_given_are_not_replaced_by_others(algorithm: str, option: Option, values: tuple[float, ...]) -> None:
    """Two values beside a default give two other results: no bound swallows them."""
    beside = dict(option.note.beside)
    results = {result(algorithm, {**beside, option.name: value}) for value in values}
    assert len(results | {result(algorithm, beside)}) == 3


@pytest.mark.parametrize("algorithm", quark.algorithms().names())
def test_the_settings_that_are_written_are_those_that_were_used(algorithm: str) -> None:
    """Every number in a checkpoint, given explicitly, gives the same result."""
    beside = BESIDE.get(algorithm, {})
    written = json.loads(json.dumps(settings_of_a_run(algorithm, tuple(beside.items())).to_dict()))
    numbers = {name: value for name, value in written.items() if isinstance(value, int | float) and name in known(algorithm)}
    assert result(algorithm, {**numbers, **beside}) == result(algorithm, beside)


def known(algorithm: str) -> set[str]:
    return {option.name for option in options_of(algorithm)}
