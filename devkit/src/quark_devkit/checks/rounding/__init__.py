"""Checks of roundings: on a few layers, with every kind of scheme; and in whole runs (`runs`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.algorithms.validation import standard_error
from quark.calibration.plugin_checks import checked_metrics, refuse_strange
from quark.config.algorithm import AlgoConfig
from quark.config.layer import QLayerConfig
from quark.errors import QuarkError, RoundingError
from quark.models.layers import QuantizedLayer
from quark.plugins import schemes
from quark.plugins.attribution import origin
from quark_devkit.algorithm_runs import processor_of
from quark_devkit.check import check, require
from quark_devkit.checks import algorithm
from quark_devkit.option_effects import digest
from quark_devkit.random_states import random_states_kept
from quark_devkit.subject import Subject
from quark_devkit.weight_tasks import (
    COLUMNS,
    Inputs,
    inputs,
    layers_of,
    mean_square_of,
    one_scheme_of_each_kind,
    rounded,
    schemes_to_round,
    statistics,
    to_nearest,
    wrong_weight,
)

PARTS = ("runs",)
_CALLS = 40
MARGIN = 3
"""Standard errors of a difference, over the tokens of a test, that are taken for chance."""


def _rounded_by_kind(subject: Subject, **sizes: Any) -> Iterator[tuple[str, dict[str, QuantizedLayer], dict[str, QuantizedLayer]]]:
    """For one scheme of each kind: its name, rounded layers, and the same layers as they were."""
    rounding = processor_of(subject)
    for name, config in one_scheme_of_each_kind(subject).items():
        layers = layers_of(config, **sizes)
        rounded(rounding, layers, held_out=inputs(1, 32))
        yield name, layers, layers_of(config, **sizes)


def _right(layers: Mapping[str, QuantizedLayer], where: str) -> None:
    for layer in layers.values():
        wrong = wrong_weight(layer)
        require(wrong is None, f"leaves a weight that {wrong} ({where})")


def _survives(subject: Subject, config: QLayerConfig, where: str, data: Inputs, **sizes: Any) -> None:
    """Layers are rounded well, or given up by a RoundingError, for which a run rounds them to nearest."""
    layers = layers_of(config, **sizes)
    try:
        rounded(processor_of(subject), layers, data)
    except RoundingError:
        return
    _right(layers, where)


@check("rounding")
def is_made_of_its_settings(subject: Subject) -> None:
    """The processor, called with settings, gives an object with the members of a rounding, whose ``needs``
    are statistics."""
    refuse_strange(processor_of(subject), "rounding", origin("algorithms", subject.lookup_name))


@check("rounding", level="advisory", since=2)
def declares_calibration(subject: Subject) -> None:
    """A rounding that needs statistics has the capability ``calibration``, which listings show."""
    algorithm.calibration_is_declared(subject)


checks_of_settings = algorithm.checks_of_settings("rounding")


@check("rounding", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Another value of each option changes weights or the layers that it applies to, is refused, or is
    declared to change cost alone."""

    def results(settings: AlgoConfig) -> Iterator[str]:
        data, held_out = (Inputs(one.x, 1.25 * one.reference) for one in (inputs(0), inputs(1, 32)))  # as if inputs had been made smaller
        for config in one_scheme_of_each_kind(subject).values():
            rounding, layers = processor_of(subject, settings), layers_of(config, count=1)
            rounded(rounding, layers, data, held_out)
            yield digest(
                list(map(rounding.applies_to, (*layers, "self_attn.q_proj", "mlp.down_proj"))),
                *(layer.weight for layer in layers.values()),
            )

    algorithm.options_have_effects(subject, results)


@check("rounding")
def says_to_which_layers_it_applies(subject: Subject) -> None:
    """``applies_to`` answers True or False for any name, and the same each time."""
    rounding = processor_of(subject)
    for name in ("self_attn.q_proj", "mlp.experts.3.down_proj", "0", "a-name.of.no.layer"):
        answers = [rounding.applies_to(name) for _ in range(2)]
        require(all(isinstance(answer, bool) for answer in answers), f"answers {answers[0]!r} where True or False is wanted")
        require(answers[0] == answers[1], f"applies to '{name}' when it is asked first and not the second time, or the other way round")


@check("rounding")
def rounds_every_scheme(subject: Subject) -> None:
    """It rounds layers in every registered scheme that its record does not exclude, to finite values on the
    grid."""
    rounding = processor_of(subject)
    for name, config in schemes_to_round(subject).items():
        layers = layers_of(config, count=1)
        try:
            rounded(rounding, layers)
        except Exception as error:
            excluding = "a scheme that it cannot round belongs into excluded_schemes of its record, with the reason"
            require(False, f"raises {type(error).__name__} for the scheme '{name}': {error}; {excluding}")
        _right(layers, name)


@check("rounding")
def excludes_schemes_that_there_are(subject: Subject) -> None:
    """Names in ``excluded_schemes`` are those of registered schemes."""
    excluded = subject.record.excluded_schemes
    unknown = [name for name in excluded if name not in schemes()]
    require(not unknown, f"excludes the schemes {', '.join(unknown)}, which no installed distribution registers")


@check("rounding")
def leaves_finite_weights_on_the_grid(subject: Subject) -> None:
    """Every rounded weight is finite, and exactly a value that its scales allow; it rounds all layers that it
    is given."""
    for name, layers, _ in _rounded_by_kind(subject, count=3):
        _right(layers, name)


@check("rounding")
def keeps_shapes_and_dtypes(subject: Subject) -> None:
    """A rounded weight is a parameter of the shape, the dtype and the device of the float one, also in 16
    bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, layers, before in _rounded_by_kind(subject, count=1, dtype=dtype):
            for layer, old in zip(layers.values(), before.values(), strict=True):
                weight: Any = layer.weight
                seen = (type(weight), tuple(weight.shape), weight.dtype, weight.device)
                wanted = (torch.nn.Parameter, tuple(old.weight.shape), dtype, old.weight.device)  # type: ignore[arg-type]
                require(seen == wanted, f"leaves a weight {seen} where {wanted} is wanted ({name})")


@check("rounding")
def leaves_the_float_parameter_alone(subject: Subject) -> None:
    """Rounded values go to a new parameter: the float one may be shared with another module, or mapped from a
    file."""
    rounding = processor_of(subject)
    for name, config in one_scheme_of_each_kind(subject).items():
        layers = layers_of(config)
        shared: list[Any] = [layer.weight for layer in layers.values()]
        before = [weight.detach().clone() for weight in shared]
        rounded(rounding, layers)
        for weight, old, layer in zip(shared, before, layers.values(), strict=True):
            require(layer.weight is not weight, f"leaves the layer its old parameter ({name})")
            require(torch.equal(weight, old), f"writes to the float parameter, which another module may share ({name})")


@check("rounding")
def changes_nothing_but_weights(subject: Subject) -> None:
    """Biases, hooks, modules, buffers and further parameters of a layer are what they were."""
    for name, layers, before in _rounded_by_kind(subject):
        for layer, old in zip(layers.values(), before.values(), strict=True):
            require(torch.equal(layer.bias, old.bias), f"changes a bias ({name})")  # type: ignore[arg-type]
            for members in ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks"):
                seen, wanted = list(getattr(layer, members)), list(getattr(old, members))
                require(seen == wanted, f"leaves {members.strip('_')} {seen} where {wanted} were ({name})")


@check("rounding")
def reports_json_values(subject: Subject) -> None:
    """What it returns is a mapping from names of layers that it was given to metrics in JSON values."""
    config = next(iter(one_scheme_of_each_kind(subject).values()))
    layers = layers_of(config)
    report = rounded(processor_of(subject), layers)
    checked_metrics(report, set(layers), origin("algorithms", subject.lookup_name))


@check("rounding")
def uses_declared_statistics_alone(subject: Subject) -> None:
    """It asks for no statistic that is not among its ``needs``."""
    config = next(iter(one_scheme_of_each_kind(subject).values()))
    try:
        rounded(processor_of(subject), layers_of(config))
    except KeyError as error:
        require(False, f"{error.args[0]}: declare it")


@check("rounding")
def is_deterministic(subject: Subject) -> None:
    """The same layers and statistics give the same weights, in another order and after many calls too, and by
    another object of it.

    It leaves the random states of the process as they are.
    """
    first, kinds = processor_of(subject), one_scheme_of_each_kind(subject)
    given = statistics(first, [inputs(0)])
    in_turn, few = list(kinds.items()), [next(iter(kinds.items()))]
    results: dict[str, list[Tensor]] = {}
    passes = ((first, in_turn), (first, in_turn[::-1]), (first, few * _CALLS), (processor_of(subject), in_turn))
    for name, config, rounding in ((name, config, rounding) for rounding, those in passes for name, config in those):
        layers = layers_of(config)
        torch.rand(3)  # so that a global random state is another one each time
        with random_states_kept():
            rounded(rounding, layers, held_out=inputs(1, 32), given=given)
        weights: list[Any] = [layer.weight for layer in layers.values()]
        same = all(torch.equal(a, b) for a, b in zip(weights, results.setdefault(name, weights), strict=True))
        require(same, f"gives other weights when it rounds the same layers again ({name})")


@check("rounding")
def merged_statistics_give_the_same(subject: Subject) -> None:
    """Statistics of two halves of the data, merged, lead to the weights of those of all data: so that ranks
    can share the work."""
    config = next(iter(one_scheme_of_each_kind(subject).values()))
    data, half = inputs(0), len(inputs(0).x) // 2
    results = []
    for parts in ([data], [data[:half], data[half:]], [data[half:], data[:half]]):
        rounding, layers = processor_of(subject), layers_of(config)
        given = statistics(rounding, parts)
        for kind, statistic in given.items():
            require(
                statistic.tokens == len(data.x), f"has a statistic {kind.__name__} that counts {statistic.tokens} tokens of {len(data.x)}"
            )
        rounded(rounding, layers, given=given)
        results.append(torch.cat([layer.weight.detach() for layer in layers.values()]))  # type: ignore[operator]
    for other in results[1:]:
        share = float((other != results[0]).float().mean())
        require(share < 0.005, f"rounds {share:.1%} of the weights differently when statistics are merged of two halves of the data")


@check("rounding")
def statistics_leave_inputs_alone(subject: Subject) -> None:
    """Its statistics neither change the inputs that they see nor keep a reference to them."""
    rounding, data = processor_of(subject), inputs(0)
    for kind in rounding.needs:
        x, reference = data.x.clone(), data.reference.clone()
        seen = kind(COLUMNS, torch.device("cpu"))
        seen.update(x, reference if kind.wants_float else None)
        require(torch.equal(x, data.x), f"has a statistic {kind.__name__} that changes its inputs")
        x.fill_(1e4)
        reference.fill_(1e4)
        config = next(iter(one_scheme_of_each_kind(subject).values()))
        layers, wanted = layers_of(config), layers_of(config)
        rounded(rounding, layers, given={**statistics(rounding, [data]), kind: seen})
        rounded(rounding, wanted)
        same = all(torch.equal(a.weight, b.weight) for a, b in zip(layers.values(), wanted.values(), strict=True))  # type: ignore[arg-type]
        require(same, f"has a statistic {kind.__name__} that depends on inputs which are overwritten afterwards: it keeps a reference")


@check("rounding")
def is_no_worse_than_round_to_nearest(subject: Subject) -> None:
    """On tokens that it has not seen, outputs are at most ``worst_ratio`` times as wrong as by rounding to
    nearest, but for chance."""
    allowed, other = subject.record.worst_ratio, inputs(2, 1024)
    for name, config in one_scheme_of_each_kind(subject).items():
        layers, nearest = layers_of(config), layers_of(config)
        weights: list[Any] = [layer.weight.detach().clone() for layer in layers.values()]  # type: ignore[operator]
        rounded(processor_of(subject), layers, held_out=inputs(1, 32))
        to_nearest(nearest)
        errors, bound = (mean_square_of(each, weights, other) for each in (layers, nearest))
        ratio = float(errors.sum() / bound.sum())
        difference = errors.double() - allowed * bound.double()
        tolerable = float(difference.mean()) <= MARGIN * standard_error(difference)
        require(tolerable, f"makes {ratio:.3g} times the output error of round-to-nearest, {allowed:.3g} times is allowed ({name})")


@check("rounding")
def survives_few_tokens(subject: Subject) -> None:
    """With one token, or a few, it gives weights on the grid or raises RoundingError."""
    for name, config in one_scheme_of_each_kind(subject).items():
        for tokens in (1, 3):
            _survives(subject, config, f"{name}, {tokens} tokens", inputs(0)[:tokens])


@check("rounding")
def survives_dead_channels(subject: Subject) -> None:
    """Where channels of the input are always 0, or all of it is, it gives weights on the grid or raises
    RoundingError."""
    for name, config in one_scheme_of_each_kind(subject).items():
        for what, channels in (("a dead channel in three", slice(None, None, 3)), ("dead channels alone", slice(None))):
            data = inputs(0)
            x, reference = data.x.clone(), data.reference.clone()
            x[:, channels] = reference[:, channels] = 0
            _survives(subject, config, f"{name}, {what}", Inputs(x, reference))


@check("rounding")
def survives_odd_layers(subject: Subject) -> None:
    """A layer with one output channel or one input channel, and one of zeros, gets weights on the grid or a
    RoundingError."""
    for name, config in one_scheme_of_each_kind(subject).items():
        _survives(subject, config, f"{name}, one output channel", inputs(0), rows=1)
        layers = layers_of(config, count=1)
        for layer in layers.values():
            layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)  # type: ignore[arg-type]
        try:
            rounded(processor_of(subject), layers)
        except RoundingError:
            continue
        _right(layers, f"{name}, zeros")
        seen = max(float(layer.weight.abs().max()) for layer in layers.values())  # type: ignore[operator]
        require(seen < 1e-6, f"makes values of {seen:.3g} of a weight of zeros ({name})")
    for name, config in _for_one_channel(subject):
        _survives(subject, config, f"{name}, one input channel", inputs(0, columns=1), columns=1)


def _for_one_channel(subject: Subject) -> Iterator[tuple[str, QLayerConfig]]:
    """Schemes that fit layers with one input channel."""
    for name, config in one_scheme_of_each_kind(subject).items():
        module = next(iter(layers_of(config, count=1).values())).weight_quantizer
        try:
            if module is not None and module.quantizer.shape_error((32, 1)) is None:
                yield name, config
        except QuarkError:
            continue
