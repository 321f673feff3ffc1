"""Checks of roundings in whole runs of the pipeline, on a small model."""

from __future__ import annotations

import torch

from quark.algorithms import Rounding
from quark_devkit.algorithm_runs import require_run_on_accelerator
from quark_devkit.check import NotApplicableError, check, require
from quark_devkit.checks.algorithm_settings import processor_of, settings_of
from quark_devkit.small_models import coarse_scheme, logits, quantized, run_config, scheme_with_inputs, small_model
from quark_devkit.subject import Subject
from quark_devkit.weight_tasks import schemes_to_round
from quark_devkit.whole_runs import (
    readable_layout,
    require_reload,
    require_same_after_resume,
    require_same_by_two_ranks,
    require_same_from_disk,
)

RUN_MARGIN = 1.5
"""How much larger than by round-to-nearest the error of logits may be: it rests on a few tokens of a model of
random weights.
"""


def _schemes(subject: Subject) -> list[str]:
    """A scheme of coarse weights, and one that quantizes inputs as well."""
    names = [coarse_scheme(), scheme_with_inputs()]
    rounded = schemes_to_round(subject)
    found = [name for name in names if name is not None and name in rounded]
    if not found:
        raise NotApplicableError("its record excludes the schemes that fit the small model")
    return found


@check("rounding")
def quantizes_a_model(subject: Subject) -> None:
    """A run finishes without a warning of the pipeline's own checks, and the model's logits are about as near
    as by round-to-nearest."""
    expected = logits(small_model())
    for scheme in _schemes(subject):
        model, nearest = quantized(run_config(scheme, settings_of(subject))), quantized(run_config(scheme))
        errors = [float((logits(each) - expected).square().mean()) for each in (model, nearest)]
        allowed = RUN_MARGIN * subject.record.worst_ratio  # type: ignore[union-attr]
        require(
            errors[0] <= allowed * errors[1],
            f"makes logits {errors[0] / errors[1]:.3g} times as wrong as round-to-nearest does ({scheme})",
        )


@check("rounding")
def leaves_other_layers_to_round_to_nearest(subject: Subject) -> None:
    """Layers that it does not apply to are as in a run without it, and the plan and the report name only
    those that it does apply to."""
    rounding: Rounding = processor_of(subject)
    scheme = _schemes(subject)[0]
    model, nearest = quantized(run_config(scheme, settings_of(subject))), quantized(run_config(scheme))
    for row in model.quark_plan.quantized:
        inside = ".".join(row.name.split(".")[3:])
        applies = rounding.applies_to(inside)
        require((row.algorithm is not None) == applies, f"applies to '{row.name}': {applies}, and the plan says {row.algorithm}")
        if not applies:
            same = torch.equal(model.get_submodule(row.name).weight, nearest.get_submodule(row.name).weight)
            require(same, f"changes '{row.name}', to which it does not apply")


@check("rounding", level="advisory")
def works_on_an_accelerator(subject: Subject) -> None:
    """A run on a model of an accelerator, here a simulated one, finishes, leaves all tensors there, and is as
    good as on a CPU."""
    for scheme in _schemes(subject):
        require_run_on_accelerator(scheme, settings_of(subject))


@check("rounding")
def reloads_to_the_same_logits(subject: Subject) -> None:
    """What is exported after it reads back to the same logits, to the bit."""
    require_reload(quantized(run_config(_schemes(subject)[0], settings_of(subject))), readable_layout())


@check("rounding")
def streams_to_the_same_bytes(subject: Subject) -> None:
    """A checkpoint that is quantized from disk, one block in memory at a time, has the bytes of one that is
    quantized in memory."""
    require_same_from_disk(run_config(_schemes(subject)[0], settings_of(subject)))


@check("rounding")
def is_the_same_on_two_ranks(subject: Subject) -> None:
    """Two processes that share a deterministic run, each with half of the data, round to the weights and
    metrics of one, to the bit."""
    require_same_by_two_ranks(run_config(_schemes(subject)[-1], settings_of(subject)))


@check("rounding")
def resumes_to_the_same_bytes(subject: Subject) -> None:
    """A run from disk that is interrupted behind a block and resumed has the bytes of one that was not."""
    require_same_after_resume(run_config(_schemes(subject)[0], settings_of(subject)))
