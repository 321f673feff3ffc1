"""Settings of algorithms for runs on the small model, and the error of the logits after a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import derived_config, with_options
from quark.errors import QuarkError, UnsupportedError
from quark.plugins import AlgorithmRecord, algorithms
from quark.runs import ModelQuantizer
from quark.runs.run import plan_run
from quark_devkit.check import NotApplicableError, assume, complaining, require
from quark_devkit.extent import is_thorough
from quark_devkit.simulated_device import SimulatedDevice, simulated_device
from quark_devkit.small_models import batches, coarse_scheme, logits, quantized, run_config, scheme_with_inputs, small_family, small_model
from quark_devkit.subject import Subject, find_subject

__all__ = [
    "HARM",
    "accelerator",
    "logit_error",
    "others",
    "processor_of",
    "require_run_on_accelerator",
    "run_with",
    "schemes_for",
    "settings_of",
    "shortened",
    "valid_settings",
]

HARM = 1.5
"""Largest allowed ratio of the logits' error with an algorithm to the error without it; it is large, since
the model is random and tokens are few.
"""


def schemes_for(subject: Subject) -> list[str]:
    """Return two schemes: one with coarse weights, and one that also quantizes inputs.

    A scheme that the algorithm's record excludes is left out.

    Raises:
        NotApplicableError: The record excludes both schemes.
    """
    names = (coarse_scheme(), scheme_with_inputs())
    found = [name for name in names if name is not None and name not in subject.record.excluded_schemes]
    assume(found, "its record excludes the schemes that fit the small model")
    return found


def settings_of(subject: Subject, *, is_fused: bool = False) -> AlgoConfig:
    """Return the settings that the algorithm derives for the small model's family, or else its defaults.

    Args:
        subject: The algorithm.
        is_fused: Whether to use the small model with fused projections.

    Raises:
        NotApplicableError: The algorithm refuses the small model's family.
        CheckFailedError: The algorithm has neither derived settings nor defaults.
    """
    kind, architecture = subject.load("config"), small_family(is_fused=is_fused)
    reason = kind.refusal(architecture)
    assume(reason is None, f"it does not apply to the family of the small model: {reason}")
    settings = derived_config(subject.lookup_name, architecture)
    if settings is not None:
        return settings
    with complaining("cannot build settings without arguments or from a family's facts", TypeError):
        return kind()


def processor_of(subject: Subject, settings: AlgoConfig | None = None) -> Any:
    """Return the object that the algorithm's processor creates from ``settings``.

    By default, these are the settings that `settings_of` returns.

    Raises:
        NotApplicableError: The record has a configuration but no processor.
    """
    assume(subject.record.processor is not None, "the record has a configuration but no processor")
    return subject.load("processor")(settings_of(subject) if settings is None else settings)


def valid_settings(subject: Subject, *, is_fused: bool = False) -> AlgoConfig:
    """Return an algorithm's settings for runs on the small model, after the processor has accepted them.

    Values of options are replaced as in `shortened`.
    """
    processor_of(subject)
    return shortened(subject, settings_of(subject, is_fused=is_fused))


def shortened(subject: Subject, settings: AlgoConfig) -> AlgoConfig:
    """Return the settings, changed so that runs are short.

    Some options declare a value for checks, and get this value.

    It is ``in_checks`` of `quark.plugins.options.OptionNote`. In thorough checks, the settings stay
    unchanged.
    """
    notes = {option.name: option.note.in_checks for option in subject.registry.options(subject.lookup_name)}
    values = {name: value for name, value in notes.items() if value is not None}
    return settings if is_thorough() or not values else with_options(subject.name, settings, values)


def run_with(subject: Subject) -> QConfig:
    """Return the configuration of a run on the small model with an algorithm, in the coarsest scheme."""
    return run_config(schemes_for(subject)[0], valid_settings(subject))


def others(subject: Subject, kind: str) -> Iterator[tuple[AlgorithmRecord, AlgoConfig]]:
    """Yield the other algorithms of a kind, each with its settings.

    Algorithms that have the subject's role, or that cannot be planned for the small model in the coarsest
    scheme, are left out.
    """
    for record in algorithms():
        excluded = record.role is not None and record.role == subject.record.role
        if record.kind != kind or record.name == subject.name or excluded or record.processor is None:
            continue
        try:
            other = find_subject(subject.catalog, kind, record.name)
            settings = shortened(other, settings_of(other))
            plan_run(small_model(), run_config(coarse_scheme(), settings))
        except QuarkError:  # other checks find algorithms that do not fit the small model or its scheme, or are broken
            continue
        yield record, settings


def logit_error(scheme: str, *settings: AlgoConfig) -> float:
    """Return the mean squared difference between the logits after a run and the logits of the float model."""
    return float((logits(quantized(run_config(scheme, *settings))) - logits(small_model())).square().mean())


@contextmanager
def accelerator() -> Iterator[SimulatedDevice]:
    """Yield the simulated accelerator.

    Raises:
        NotApplicableError: Another package already uses torch's only slot for a device.
    """
    with ExitStack() as stack:
        try:
            device = stack.enter_context(simulated_device())
        except UnsupportedError as error:
            raise NotApplicableError(str(error)) from None
        yield device


def require_run_on_accelerator(scheme: str, *settings: AlgoConfig) -> None:
    """Require that a run on an accelerator finishes and leaves all tensors there.

    The error of the logits must be at most `HARM` times the error of a run on a CPU.
    """
    config, expected = run_config(scheme, *settings), logits(small_model())
    with accelerator() as device:
        model: Any = ModelQuantizer(config).quantize_model(small_model().to(device.name), batches())
        tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != device.name]
        require(not elsewhere, f"leaves '{elsewhere[0] if elsewhere else ''}' on another device than the model, which is on an accelerator")
        found = logits(model, [x.to(device.name) for x in batches(4, seed=1)]).cpu()
    ratio = float((found - expected).square().mean()) / logit_error(scheme, *settings)
    require(ratio <= HARM, f"makes the error of the logits {ratio:.3g} times as large on an accelerator as on a CPU ({scheme})")
