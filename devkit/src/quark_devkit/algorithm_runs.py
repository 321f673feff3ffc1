"""What checks of algorithms that change a model run: schemes, settings of an algorithm and of others for the small model, its error."""

from __future__ import annotations

from collections.abc import Iterator

from quark.config.algorithm import AlgoConfig
from quark.errors import QuarkError
from quark.plugins import AlgorithmRecord, algorithms
from quark_devkit.settings_checks import processor_of, settings_of
from quark_devkit.small_models import coarse_scheme, logits, quantized, run_config, scheme_with_inputs, small_model
from quark_devkit.subject import Subject, find_subject

__all__ = ["HARM", "logit_error", "others", "schemes", "valid_settings"]

HARM = 1.5
"""How much larger than without an algorithm the error of logits may be: it rests on a few tokens of a model
of random weights.
"""


def schemes() -> list[str]:
    """Return a scheme of coarse weights, and one that quantizes inputs as well."""
    other = scheme_with_inputs()
    return [coarse_scheme(), *([] if other is None else [other])]


def valid_settings(subject: Subject, *, is_fused: bool = False) -> AlgoConfig:
    """Return the settings of an algorithm for the small model, after a check that its processor takes them."""
    processor_of(subject)
    return settings_of(subject, is_fused=is_fused)


def others(subject: Subject, kind: str) -> Iterator[tuple[AlgorithmRecord, AlgoConfig]]:
    """Yield the other registered algorithms of a kind that may be in a run with this one, with settings for the small model."""
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
