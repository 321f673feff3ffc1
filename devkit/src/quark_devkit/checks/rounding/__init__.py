"""Checks of roundings, on a few layers with every kind of scheme, and in whole runs on a small model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quark.algorithms import Rounding, RoundingTask, RoundToNearest, Statistic, float_weight
from quark.algorithms.validation import standard_error
from quark.calibration.plugin_checks import checked_metrics, refuse_strange
from quark.config.algorithm import AlgoConfig
from quark.errors import RoundingError
from quark.plugins import schemes
from quark.plugins.attribution import origin
from quark_devkit.algorithm_runs import HARM, logit_error, processor_of, schemes_for, settings_of, valid_settings
from quark_devkit.check import assume, check, require
from quark_devkit.checks import algorithm
from quark_devkit.checks.rounding.tasks import (
    Case,
    cases,
    layers_of,
    mean_square_of,
    one_case,
    require_on_grid,
    rounded,
    schemes_to_round,
    statistics,
)
from quark_devkit.option_effects import digest
from quark_devkit.random_states import random_states_kept
from quark_devkit.small_models import fitting, quantized, run_config
from quark_devkit.statistic_laws import COLUMNS, Inputs, inputs, statistics_by_grouping
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import require_same_by_two_ranks

_CALLS = 40
MARGIN = 3
"""Number of standard errors, over the tokens of a test, up to which a difference counts as chance."""


def _survives(case: Case, where: str, layers: dict[str, Any], data: Inputs | None = None) -> bool:
    """Require that the layers get weights on the grid, or that the rounding raises RoundingError.

    After this error, a run rounds to nearest.

    Returns:
        Whether the rounding has rounded the layers.
    """
    try:
        rounded(case.rounding(), layers, data)
    except RoundingError:
        return False
    require_on_grid(layers.values(), f" ({case}, {where})")
    return True


@check("rounding")
def is_made_of_its_settings(subject: Subject) -> None:
    """The processor, called with settings, returns a `quark.algorithms.Rounding`, whose ``needs`` are
    statistics.
    """
    refuse_strange(processor_of(subject), "rounding", origin("algorithms", subject.lookup_name))


@check("rounding", level="advisory", since=2)
def declares_calibration(subject: Subject) -> None:
    """A rounding that needs statistics declares the capability ``calibration`` for listings."""
    algorithm.calibration_is_declared(subject)


checks_of_settings = tuple(map(check("rounding"), algorithm.OF_SETTINGS))


@check("rounding", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different weights, or make the rounding apply to other layers,
    whatever the boolean options are. A value may be refused instead, and an option may be declared to change
    only the cost."""

    def results(settings: AlgoConfig) -> Iterator[str]:
        data, held_out = (Inputs(one.x, 1.25 * one.reference) for one in (inputs(0), inputs(1, 32)))  # as if quantization shrank inputs
        for case in cases(subject):
            rounding, layers = processor_of(subject, settings), layers_of(case.config, count=1)
            rounded(rounding, layers, data, held_out)
            answers = list(map(rounding.applies_to, (*layers, "self_attn.q_proj", "mlp.down_proj")))
            yield digest(answers, *(layer.weight for layer in layers.values()))

    algorithm.options_have_effects(subject, results)


@check("rounding")
def says_to_which_layers_it_applies(subject: Subject) -> None:
    """``applies_to`` returns True or False for any name, and returns the same at every call."""
    rounding = processor_of(subject)
    for name in ("self_attn.q_proj", "mlp.experts.3.down_proj", "0", "a-name.of.no.layer"):
        answers = [rounding.applies_to(name) for _ in range(2)]
        require(all(isinstance(answer, bool) for answer in answers), f"returns {answers[0]!r}, not True or False")
        require(answers[0] == answers[1], f"gives two different answers from applies_to('{name}')")


@check("rounding")
def rounds_every_scheme(subject: Subject) -> None:
    """In every registered scheme that the record does not exclude, the rounding rounds layers to finite
    values on the grid."""
    rounding = processor_of(subject)
    for name, config in schemes_to_round(subject).items():
        layers = layers_of(config, count=1)
        try:
            rounded(rounding, layers)
        except Exception as error:
            excluding = "list schemes that it cannot round in excluded_schemes of its record, with the reason"
            require(False, f"raises {type(error).__name__} for the scheme '{name}': {error}; {excluding}")
        require_on_grid(layers.values(), f" ({name})")


@check("rounding")
def excludes_schemes_that_there_are(subject: Subject) -> None:
    """Each name in ``excluded_schemes`` is a registered scheme."""
    unknown = [name for name in subject.record.excluded_schemes if name not in schemes()]
    require(not unknown, f"excludes the schemes {', '.join(unknown)}, which no installed distribution registers")


@check("rounding", each=cases)
def leaves_finite_weights_on_the_grid(case: Case) -> None:
    """The rounding rounds all given layers, and every rounded weight is finite and exactly on the grid of its
    scales.
    """
    require_on_grid([layer for layer, _ in case.rounded(count=3)])


@check("rounding", each=cases)
def keeps_shapes_and_dtypes(case: Case) -> None:
    """A rounded weight is a parameter with the shape, dtype and device of the float weight,
    also in 16 bits.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layer, before in case.rounded(count=1, dtype=dtype):
            seen = (type(layer.weight), tuple(layer.weight.shape), layer.weight.dtype, layer.weight.device)
            wanted = (torch.nn.Parameter, tuple(before.weight.shape), dtype, before.weight.device)
            require(seen == wanted, f"leaves a weight {seen}, not {wanted}")


@check("rounding", each=cases)
def leaves_the_float_parameter_alone(case: Case) -> None:
    """Rounded values go to a new parameter, since the float parameter may be shared or mapped from a file."""
    layers: dict[str, Any] = layers_of(case.config)
    shared = {name: (layer.weight, layer.weight.detach().clone()) for name, layer in layers.items()}
    rounded(case.rounding(), layers)
    for name, (weight, before) in shared.items():
        require(layers[name].weight is not weight, "leaves the old parameter in the layer")
        require(torch.equal(weight, before), "writes to the float parameter, which another module may share")


@check("rounding", each=cases)
def changes_nothing_but_weights(case: Case) -> None:
    """Biases, hooks, modules, buffers and further parameters of a layer stay unchanged."""
    for layer, before in case.rounded():
        require(torch.equal(layer.bias, before.bias), "changes a bias")
        for members in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            seen, wanted = list(getattr(layer, members)), list(getattr(before, members))
            require(seen == wanted, f"leaves {members.strip('_')} {seen}, not {wanted}")


@check("rounding", each=one_case)
def reports_json_values(case: Case) -> None:
    """The rounding returns a mapping from the names of the given layers to metrics, which are JSON values."""
    layers = layers_of(case.config)
    report = checked_metrics(rounded(case.rounding(), layers), origin("algorithms", case.subject.lookup_name))
    unknown = [name for name in report if name not in layers]
    require(not unknown, f"reports metrics of '{unknown[0] if unknown else ''}', which is not among its layers")


@check("rounding", each=one_case)
def uses_declared_statistics_alone(case: Case) -> None:
    """The rounding uses only statistics in its ``needs``."""
    try:
        rounded(case.rounding(), layers_of(case.config))
    except KeyError as error:
        require(False, f"{error.args[0]}: add it to needs")


@check("rounding")
def is_deterministic(subject: Subject) -> None:
    """The same layers and statistics give the same weights, also after other layers, after many calls, and
    from a new object.

    Random states of the process do not change.
    """
    first, in_turn = processor_of(subject), cases(subject)
    given = statistics(first, [inputs(0)])
    results: dict[str, list[Tensor]] = {}
    passes = ((first, in_turn), (first, in_turn[::-1]), (first, in_turn[:1] * _CALLS), (processor_of(subject), in_turn))
    for case, rounding in ((case, rounding) for rounding, those in passes for case in those):
        layers = layers_of(case.config)
        torch.rand(3)  # the global random state then differs each time
        with random_states_kept():
            rounded(rounding, layers, held_out=inputs(1, 32), given=given)
        weights: list[Any] = [layer.weight for layer in layers.values()]
        same = all(torch.equal(a, b) for a, b in zip(weights, results.setdefault(case.name, weights), strict=True))
        require(same, f"returns different weights when it rounds the same layers again ({case})")


statistics_are_sums_over_tokens = check("rounding", since=2)(algorithm.statistics_are_sums_over_tokens)


@check("rounding", each=one_case)
def merged_statistics_give_the_same(case: Case) -> None:
    """Statistics give the same weights whether they come from all tokens at once, from unequal batches, or
    from parts that are merged in any grouping. Ranks rely on this when they share the work."""
    data, needs = inputs(0), case.rounding().needs
    assume(needs, "it needs no statistics")

    def made(kind: type[Statistic]) -> dict[str, Statistic]:
        def feed(one: Statistic, part: slice) -> None:
            one.update(data.x[part].clone(), data.reference[part].clone() if kind.wants_float else None)

        return statistics_by_grouping(lambda: kind(COLUMNS, torch.device("cpu")), feed)

    by_kind = {kind: made(kind) for kind in needs}
    results = {}
    for how in next(iter(by_kind.values())):
        layers = layers_of(case.config)
        rounded(case.rounding(), layers, given={kind: statistics[how] for kind, statistics in by_kind.items()})
        results[how] = torch.cat([float_weight(layer).detach() for layer in layers.values()])
    (_, wanted), *others = results.items()
    for how, other in others:
        share = float((other != wanted).float().mean())
        require(share < 0.005, f"rounds {share:.1%} of the weights differently with statistics {how} than of all tokens at once")


@check("rounding", each=one_case)
def statistics_leave_inputs_alone(case: Case) -> None:
    """Statistics neither change the inputs that they see nor keep a reference to them."""
    rounding, data = case.rounding(), inputs(0)
    for kind in rounding.needs:
        x, reference = data.x.clone(), data.reference.clone()
        seen = kind(COLUMNS, torch.device("cpu"))
        seen.update(x, reference if kind.wants_float else None)
        require(torch.equal(x, data.x), f"has a statistic {kind.__name__} that changes its inputs")
        x.fill_(1e4)
        reference.fill_(1e4)
        layers, wanted = layers_of(case.config), layers_of(case.config)
        rounded(rounding, layers, given={**statistics(rounding, [data]), kind: seen})
        rounded(rounding, wanted)
        same = all(torch.equal(float_weight(layer), float_weight(wanted[name])) for name, layer in layers.items())
        require(same, f"has a statistic {kind.__name__} that depends on inputs after they are overwritten: it keeps a reference")


@check("rounding", each=cases)
def is_no_worse_than_round_to_nearest(case: Case) -> None:
    """On unseen tokens, the output error is at most ``worst_ratio`` times the error of round-to-nearest, plus
    a margin for chance.
    """
    allowed, other = case.subject.record.worst_ratio, inputs(2, 1024)
    layers, nearest = layers_of(case.config), layers_of(case.config)
    weights = [float_weight(layer).detach().clone() for layer in layers.values()]
    rounded(case.rounding(), layers, held_out=inputs(1, 32))
    RoundToNearest().round(RoundingTask(nearest))
    errors, bound = (mean_square_of(each, weights, other) for each in (layers, nearest))
    ratio = float(errors.sum() / bound.sum())
    difference = errors.double() - allowed * bound.double()
    tolerable = float(difference.mean()) <= MARGIN * standard_error(difference)
    require(tolerable, f"makes the output error {ratio:.3g} times as large as round-to-nearest; {allowed:.3g} times is allowed")


@check("rounding")
def survives_few_tokens(subject: Subject) -> None:
    """With one or a few tokens, the rounding gives weights on the grid or raises RoundingError."""
    for case in cases(subject):
        for tokens in (1, 3):
            _survives(case, f"{tokens} tokens", layers_of(case.config), inputs(0)[:tokens])


@check("rounding")
def survives_dead_channels(subject: Subject) -> None:
    """If some or all input channels are always 0, the rounding gives weights on the grid or raises
    RoundingError."""
    for case in cases(subject):
        for what, channels in (("a dead channel in three", slice(None, None, 3)), ("dead channels alone", slice(None))):
            data = inputs(0)
            x, reference = data.x.clone(), data.reference.clone()
            x[:, channels] = reference[:, channels] = 0
            _survives(case, what, layers_of(case.config), Inputs(x, reference))


@check("rounding")
def survives_odd_layers(subject: Subject) -> None:
    """For layers with one output or input channel, or with zero weights, the rounding gives weights on the
    grid or raises RoundingError.
    """
    for case in cases(subject):
        _survives(case, "one output channel", layers_of(case.config, rows=1))
        layers: dict[str, Any] = layers_of(case.config, count=1)
        for layer in layers.values():
            layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)
        if _survives(case, "zeros", layers):
            seen = max(float(layer.weight.abs().max()) for layer in layers.values())
            require(seen < 1e-6, f"rounds a weight of zeros to {seen:.3g} ({case})")
    of_one_channel = fitting([(32, 1)])
    for case in (case for case in cases(subject) if case.name in of_one_channel):
        _survives(case, "one input channel", layers_of(case.config, columns=1))


@check("rounding")
def quantizes_a_model(subject: Subject) -> None:
    """A run finishes without warnings of the pipeline's checks, and the logits are about as accurate as with
    round-to-nearest.
    """
    for scheme in schemes_for(subject):
        ratio = logit_error(scheme, settings_of(subject)) / logit_error(scheme)
        allowed = HARM * subject.record.worst_ratio
        require(ratio <= allowed, f"makes the error of the logits {ratio:.3g} times as large as round-to-nearest ({scheme})")


@check("rounding")
def leaves_other_layers_to_round_to_nearest(subject: Subject) -> None:
    """Layers to which the rounding does not apply are the same as in a run without the rounding. The plan
    names the rounding for the layers to which it applies, and for no others.
    """
    rounding: Rounding = processor_of(subject)
    scheme = schemes_for(subject)[0]
    model, nearest = quantized(run_config(scheme, valid_settings(subject))), quantized(run_config(scheme))
    for row in model.quark_plan.quantized:
        inside = ".".join(row.name.split(".")[3:])
        applies = rounding.applies_to(inside)
        require(
            (row.algorithm is not None) == applies, f"for '{row.name}', returns {applies} from applies_to, but the plan has {row.algorithm}"
        )
        if not applies:
            same = torch.equal(model.get_submodule(row.name).weight, nearest.get_submodule(row.name).weight)
            require(same, f"changes '{row.name}', to which it does not apply")


works_on_an_accelerator = check("rounding", level="advisory")(algorithm.works_on_an_accelerator)
checks_of_runs = tuple(map(check("rounding"), algorithm.OF_RUNS))


@check("rounding")
def is_the_same_on_two_ranks(subject: Subject) -> None:
    """Two processes that share a deterministic run, each with half of the data, give the same weights and
    metrics as one process, to the bit.
    """
    require_same_by_two_ranks(run_config(schemes_for(subject)[-1], valid_settings(subject)))
