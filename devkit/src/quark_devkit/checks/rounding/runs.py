"""Checks of roundings in whole runs of the pipeline, on a small model."""

from __future__ import annotations

import torch

from quark.algorithms import Rounding
from quark_devkit.algorithm_runs import processor_of, schemes_for, settings_of
from quark_devkit.check import check, require
from quark_devkit.checks import algorithm
from quark_devkit.small_models import logits, quantized, run_config, small_model
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import require_same_by_two_ranks

RUN_MARGIN = 1.5
"""How much larger than by round-to-nearest the error of logits may be: it rests on a few tokens of a model of
random weights.
"""


@check("rounding")
def quantizes_a_model(subject: Subject) -> None:
    """A run finishes without a warning of the pipeline's own checks, and the model's logits are about as near
    as by round-to-nearest."""
    expected = logits(small_model())
    for scheme in schemes_for(subject):
        model, nearest = quantized(run_config(scheme, settings_of(subject))), quantized(run_config(scheme))
        errors = [float((logits(each) - expected).square().mean()) for each in (model, nearest)]
        allowed = RUN_MARGIN * subject.record.worst_ratio
        ratio = errors[0] / errors[1]
        require(errors[0] <= allowed * errors[1], f"makes logits {ratio:.3g} times as wrong as round-to-nearest does ({scheme})")


@check("rounding")
def leaves_other_layers_to_round_to_nearest(subject: Subject) -> None:
    """Layers that it does not apply to are as in a run without it, and the plan and the report name only
    those that it does apply to."""
    rounding: Rounding = processor_of(subject)
    scheme = schemes_for(subject)[0]
    model, nearest = quantized(run_config(scheme, settings_of(subject))), quantized(run_config(scheme))
    for row in model.quark_plan.quantized:
        inside = ".".join(row.name.split(".")[3:])
        applies = rounding.applies_to(inside)
        require((row.algorithm is not None) == applies, f"applies to '{row.name}': {applies}, and the plan says {row.algorithm}")
        if not applies:
            same = torch.equal(model.get_submodule(row.name).weight, nearest.get_submodule(row.name).weight)
            require(same, f"changes '{row.name}', to which it does not apply")


works_on_an_accelerator = check("rounding", level="advisory")(algorithm.works_on_an_accelerator)
checks_of_runs = algorithm.checks_of_runs("rounding")


@check("rounding")
def is_the_same_on_two_ranks(subject: Subject) -> None:
    """Two processes that share a deterministic run, each with half of the data, round to the weights and
    metrics of one, to the bit."""
    require_same_by_two_ranks(run_config(schemes_for(subject)[-1], settings_of(subject)))
