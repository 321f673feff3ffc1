"""The evaluation of speech models: word error rate, perplexity, and comparison with a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from quark.checkpoint.transformers_loading import load_checkpoint
from quark.errors import ConfigError
from quark.models.hf.model_config import model_config
from quark_workbench.data import Sample
from quark_workbench.data.processor import SampleProcessor
from quark_workbench.evaluate import compare, likelihood
from quark_workbench.evaluate.metrics import Mean, TokenMetrics
from quark_workbench.evaluate.outputs import compare_outputs
from quark_workbench.evaluate.sample_windows import SampleWindow
from quark_workbench.evaluate.word_error_rate import rate_difference, transcripts, word_error_rate, word_errors

__all__ = ["speech_metrics"]


def speech_metrics(
    paths: tuple[Path, Path | None],
    processor: SampleProcessor,
    windows: Sequence[SampleWindow],
    samples: Sequence[Sample],
    metric: list[str],
    where: dict[str, Any],
) -> dict[str, Any]:
    """Return the metrics of a speech model and the comparison of the model with a reference, as plain data.

    Args:
        paths: The directory of the model, and the directory of the reference or None.
        processor: The processor of the model.
        windows: The samples as windows of tokens.
        samples: Samples with a sound and the text that is spoken in it.
        metric: Names of further metrics, which must be metrics of predicted tokens.
        where: Arguments of `quark.checkpoint.transformers_loading.load_checkpoint`.

    Raises:
        QuarkError: A checkpoint cannot be read, there is no such metric, or a logit is NaN or Inf.
    """
    path, reference_path = paths
    if processor.is_ctc and metric:
        raise ConfigError(
            f"--metric {metric[0]} measures predicted tokens, but a {processor.model_class.__name__} predicts none: leave out --metric"
        )
    TokenMetrics.of(metric, has_reference=reference_path is not None)
    if reference_path is not None:
        model_config(reference_path, trust_remote_code=where["trust_remote_code"])  # fails early if the reference is missing
    texts = [getattr(sample, "text", "") for sample in samples]

    def errors_of(model: Any) -> list[tuple[int, int]]:
        written = transcripts(model, processor, windows, samples)
        return [word_errors(*pair) for pair in zip(written, texts, strict=True)]

    model = load_checkpoint(path, **where)
    errors = errors_of(model)
    result: dict[str, Any] = {"words": sum(words for _, words in errors)} | _rate("word_error_rate", word_error_rate(errors))
    result |= {} if processor.is_ctc else {"unit": "token"}
    if reference_path is None:
        if processor.is_ctc:
            return result
        of_tokens = likelihood(model, windows, metric)
        result |= {"tokens": of_tokens.tokens, "perplexity": of_tokens.perplexity.value, "perplexity_error": of_tokens.perplexity.error}
        result |= {"bits_per_token": of_tokens.bits_per_token}
        return result | {"metrics": {name: attrs.asdict(mean) for name, mean in of_tokens.metrics.items()}}
    reference = load_checkpoint(reference_path, **where)
    expected = errors_of(reference)
    result |= _rate("reference_word_error_rate", word_error_rate(expected))
    result |= _rate("word_error_rate_difference", rate_difference(errors, expected))
    result |= {"reference": str(reference_path)}
    if processor.is_ctc:
        return result | {"outputs": {name: attrs.asdict(one) for name, one in compare_outputs(model, reference, windows).items()}}
    return result | attrs.asdict(compare(model, reference, windows, metric))


def _rate(name: str, rate: Mean) -> dict[str, float | None]:
    return {name: rate.value, f"{name}_error": rate.error}
