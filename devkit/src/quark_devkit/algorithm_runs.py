"""Settings of algorithms for runs on the small model, on an accelerator too, and the error of its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from quark.config.algorithm import AlgoConfig
from quark.errors import QuarkError, UnsupportedError
from quark.plugins import AlgorithmRecord, algorithms
from quark.runs import ModelQuantizer
from quark_devkit.check import NotApplicableError, require
from quark_devkit.checks.algorithm_settings import processor_of, settings_of
from quark_devkit.simulated_device import SimulatedDevice, simulated_device
from quark_devkit.small_models import batches, coarse_scheme, logits, quantized, run_config, scheme_with_inputs, small_model
from quark_devkit.subject import Subject, find_subject

__all__ = ["HARM", "accelerator", "logit_error", "others", "require_run_on_accelerator", "schemes", "valid_settings"]

HARM = 1.5
"""How much larger than without an algorithm the error of logits may be: it rests on a few tokens of a model
of random weights.
"""


def schemes() -> list[str]:
    """Return a scheme of coarse weights, and one that quantizes inputs as well."""
    other = scheme_with_inputs()
    return [coarse_scheme(), *([] if other is None else [other])]


def valid_settings(subject: Subject, *, is_fused: bool = False) -> AlgoConfig:
    """Return an algorithm's settings for the small model, after a check that its processor takes them."""
    processor_of(subject)
    return settings_of(subject, is_fused=is_fused)


def others(subject: Subject, kind: str) -> Iterator[tuple[AlgorithmRecord, AlgoConfig]]:
    """Yield the other algorithms of a kind that go into a run with this one, with their settings."""
    for record in algorithms():
        excluded = record.role is not None and record.role == subject.record.role  # type: ignore[union-attr]
        if record.kind != kind or record.name == subject.name or excluded or record.processor is None:
            continue
        try:
            yield record, settings_of(find_subject(subject.catalog, kind, record.name))
        except QuarkError:  # it does not fit the small model, or is broken, which is not what is checked here
            continue


def logit_error(scheme: str, *settings: AlgoConfig) -> float:
    """Return the mean squared error of a logit after a run."""
    return float((logits(quantized(run_config(scheme, *settings))) - logits(small_model())).square().mean())


@contextmanager
def accelerator() -> Iterator[SimulatedDevice]:
    """Yield the simulated accelerator.

    Raises:
        NotApplicableError: This process has another device in its place.
    """
    with ExitStack() as stack:
        try:
            device = stack.enter_context(simulated_device())
        except UnsupportedError as error:
            raise NotApplicableError(str(error)) from None
        yield device


def require_run_on_accelerator(scheme: str, *settings: AlgoConfig) -> None:
    """Require that a run on an accelerator finishes, leaves all tensors there, and is as good as on a CPU."""
    config, expected = run_config(scheme, *settings), logits(small_model())
    with accelerator() as device:
        model: Any = ModelQuantizer(config).quantize_model(small_model().to(device.name), batches())
        tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != device.name]
        require(not elsewhere, f"leaves '{elsewhere[0] if elsewhere else ''}' on another device than the model, which is on an accelerator")
        found = logits(model, [x.to(device.name) for x in batches(4, seed=1)]).cpu()
    ratio = float((found - expected).square().mean()) / logit_error(scheme, *settings)
    require(ratio <= HARM, f"makes logits {ratio:.3g} times as wrong on an accelerator as on a CPU ({scheme})")
