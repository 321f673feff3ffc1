"""Functions that evaluate a checkpoint with suitable metrics, for ``quark evaluate`` and for reports.

The kind of the model decides whether these are metrics of predicted tokens, of transcripts, of whole texts or
of other outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from quark.checkpoint.transformers_loading import load_checkpoint
from quark.errors import ConfigError, NonFiniteError
from quark.models.hf.model_config import model_config
from quark_workbench.commands.evaluate_speech import speech_metrics
from quark_workbench.data import Sample
from quark_workbench.data.processor import load_processor
from quark_workbench.data.samples import rendered
from quark_workbench.evaluate import Windows, compare, likelihood
from quark_workbench.evaluate.by_block import compare_by_block, likelihood_by_block
from quark_workbench.evaluate.metrics import TokenMetrics
from quark_workbench.evaluate.outputs import compare_outputs, gives_next_tokens
from quark_workbench.evaluate.sample_windows import sample_windows
from quark_workbench.evaluate.whole_texts import TextKind
from quark_workbench.evaluate.word_error_rate import words_of

__all__ = ["compare_texts", "evaluate_samples", "evaluate_windows", "texts_of"]


def texts_of(tokenizer: Any, samples: Iterable[Sample], limit: int) -> list[str]:
    """Return at most ``limit`` texts: the samples, or the paragraphs of a single sample."""
    texts = [rendered(tokenizer, sample) for sample in islice(samples, limit)]
    if len(texts) == 1:
        texts = [part.strip() for part in texts[0].split("\n\n") if part.strip()][:limit]
    return texts


def compare_texts(whole: TextKind, paths: tuple[Path, Path], texts: list[str], where: dict[str, Any], by_block: bool) -> dict[str, Any]:
    """Return the comparison of a model with its reference, for a model whose input is a whole text.

    Args:
        whole: The kind of the model, such as an embedder.
        paths: The directory of the model, and the directory of the reference.
        texts: The texts to compare on.
        where: Arguments of `quark.checkpoint.transformers_loading.load_checkpoint`.
        by_block: Whether the user asks for ``--by-block``, which is refused.
    """
    model, reference = paths
    if by_block:
        raise ConfigError(
            f"--by-block evaluates models that predict next tokens, but '{model}' is of another kind ({whole.name}): leave out --by-block"
        )
    model_config(reference, trust_remote_code=where["trust_remote_code"])  # fails early if the reference is missing
    figures = whole.compare(load_checkpoint(model, **where), load_checkpoint(reference, **where), texts)
    return {"reference": str(reference), "seq_len": whole.length, "figures": attrs.asdict(figures)}


def evaluate_samples(
    paths: tuple[Path, Path | None], samples: list[Sample], metric: list[str], where: dict[str, Any], by_block: bool
) -> dict[str, Any]:
    """Return the metrics of a model over samples with images or sounds.

    For a speech model, the word error rate is measured too. For a CTC model, this happens only if the samples
    have the spoken text.
    """
    processor = load_processor(paths[0], trust_remote_code=where["trust_remote_code"])
    batches = sample_windows(processor, samples)
    facts = {"protocol": {"name": "samples"}, "windows": len(batches), "seq_len": max(one.tokens.shape[1] for one in batches)}
    has_words = any(words_of(getattr(sample, "text", "")) for sample in samples)
    if not processor.is_speech_to_text and not (processor.is_ctc and has_words):
        return facts | evaluate_windows(paths, batches, metric, where, by_block)
    if by_block:
        raise ConfigError(f"'{paths[0]}' is a speech model, which runs as a whole: leave out --by-block")
    return facts | speech_metrics(paths, processor, batches, samples, metric, where)


def evaluate_windows(
    paths: tuple[Path, Path | None], batches: Sequence[Windows], metric: list[str], where: dict[str, Any], by_block: bool
) -> dict[str, Any]:
    """Return the metrics of a model over batches of windows, and a comparison of the model with a reference.

    For a model that does not predict tokens, return only how similar its outputs are to the reference's
    outputs.

    ``paths`` has the directory of the model, and the directory of the reference or None.
    """
    model, reference = paths
    TokenMetrics.of(metric, has_reference=reference is not None)
    if reference is not None:
        model_config(reference, trust_remote_code=where["trust_remote_code"])  # fails early if the reference is missing
    loaded = None if by_block else load_checkpoint(model, **where)
    if loaded is not None and not gives_next_tokens(loaded):
        if reference is None or metric:
            raise ConfigError(
                f"a {type(loaded).__name__} does not predict tokens, so it has no perplexity: give --reference MODEL without --metric to "
                f"compare the outputs of both"
            )
        outputs = compare_outputs(loaded, load_checkpoint(reference, **where), batches)
        return {"reference": str(reference), "outputs": {name: attrs.asdict(similarity) for name, similarity in outputs.items()}}
    result: dict[str, Any] = {"unit": "token" if batches[0].words is None else "word"}
    try:
        if reference is not None:
            if loaded is None:
                comparison = compare_by_block(model, reference, batches, metric, **where)
            else:
                comparison = compare(loaded, load_checkpoint(reference, **where), batches, metric)
            return result | {"reference": str(reference)} | attrs.asdict(comparison)
        by_model = likelihood_by_block(model, batches, metric, **where) if loaded is None else likelihood(loaded, batches, metric)
    except NonFiniteError as error:
        checkpoints = f"'{model}'" if reference is None else f"'{model}' beside '{reference}'"
        raise NonFiniteError(f"{checkpoints}: {error}", tensor=error.tensor) from error
    result |= {"tokens": by_model.tokens, "perplexity": by_model.perplexity.value}
    result |= {"perplexity_error": by_model.perplexity.error, "bits_per_token": by_model.bits_per_token}
    return result | {"metrics": {name: attrs.asdict(mean) for name, mean in by_model.metrics.items()}}
