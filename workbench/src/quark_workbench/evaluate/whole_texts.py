"""Comparison of models that embed, rank or classify whole texts. Each kind of model has its own metric."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.base.torch_state import own_torch_state
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.models.hf.custom_code import sentence_modules
from quark.models.hf.internals import model_classes
from quark.models.hf.json_files import read_json
from quark.plugins.run_events import running
from quark_workbench.evaluate.logits import evaluating
from quark_workbench.evaluate.metrics import Mean

__all__ = ["Classifier", "Embedder", "Reranker", "RewardModel", "TextFigures", "TextKind", "kendall_tau", "text_kind"]

_POOLINGS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
"""Dictionary from pooling to the last part of its key in the configuration of sentence-transformers."""


@attrs.frozen
class TextFigures:
    """Numbers that say how well a model agrees with its reference on some texts.

    Attributes:
        kind: Kind of the model: embedder, reranker, reward model or classifier.
        metric: Name of the metric whose mean is ``value``.
        value: The mean of the metric over texts or queries. The value 1 means full agreement.
        error: Standard error of ``value``; None if it is unknown.
        lowest: The lowest of the values of which ``value`` is the mean; None if there is only one.
        texts: Number of texts.
        others: Dictionary from name to value of further figures.
    """

    kind: str
    metric: str
    value: float
    error: float | None
    lowest: float | None
    texts: int
    others: dict[str, float] = attrs.field(factory=dict)


class TextKind(ABC):
    """A kind of model that takes whole texts.

    Args:
        tokenizer: Tokenizer of the models.
        length: Largest number of tokens of a text.
        pooling: The method that makes an embedding from hidden states: mean, max, cls or last.
    """

    name: ClassVar[str]
    metric: ClassVar[str]

    def __init__(self, tokenizer: Any, length: int, pooling: str = "mean") -> None:
        self.tokenizer, self.length, self.pooling = tokenizer, length, pooling

    def compare(self, model: nn.Module, reference: nn.Module, texts: Sequence[str]) -> TextFigures:
        """Return numbers that say how well a model agrees with its reference.

        Each text is a batch of its own, without padding.

        Raises:
            ConfigError: There are too few texts.
            UnsupportedError: The models cannot be called with the texts alone.
        """
        if len(texts) < 2:
            raise ConfigError(f"a {self.name} cannot be compared on {len(texts)} text(s): give at least 2")
        with own_torch_state(), running("evaluate", source=type(model).__name__) as events, evaluating(model, reference):
            events.phase("evaluate")
            return self.figures(*(self.judged(one, texts) for one in (model, reference)))

    def outputs(self, model: Any, text: str, pair: str | None = None) -> Any:
        """Return the outputs of a model for a text, or for a pair of texts."""
        encoded = self.tokenizer(text, pair, truncation=True, max_length=self.length, return_tensors="pt")
        device = next(model.parameters()).device
        try:
            return model(**{name: value.to(device) for name, value in encoded.items()})
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                f"a {type(model).__name__} needs more inputs than a text ({error}). Compare its outputs in Python"
            ) from error

    @abstractmethod
    def judged(self, model: nn.Module, texts: Sequence[str]) -> list[Tensor]:
        """Return what a model computes for each text or query, as float64 tensors on the CPU.

        A tensor has an embedding, scores or log-probabilities of classes.
        """

    @abstractmethod
    def figures(self, given: list[Tensor], expected: list[Tensor]) -> TextFigures:
        """Return the figures from the tensors that `judged` returns for a model and for its reference."""


class Embedder(TextKind):
    """The kind of a model that computes a vector for each text."""

    name, metric = "embedder", "cosine of embeddings"

    def judged(self, model: Any, texts: Sequence[str]) -> list[Tensor]:
        """Return the embedding of each text, which is a tensor ``[H]``."""
        body = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
        return [self._pooled(self.outputs(body, text).last_hidden_state[0].double().cpu()) for text in texts]

    def figures(self, given: list[Tensor], expected: list[Tensor]) -> TextFigures:
        """Return the mean cosine, and the share of texts that have the same nearest text in both models."""
        one, other = (nn.functional.normalize(torch.stack(vectors), dim=-1) for vectors in (given, expected))
        cosines = (one * other).sum(-1)
        nearest = [(vectors @ vectors.T).fill_diagonal_(-math.inf).argmax(-1) for vectors in (one, other)]
        same = float((nearest[0] == nearest[1]).double().mean())
        return _figures(self, cosines, len(given), {"nearest text is the same": same})

    def _pooled(self, states: Tensor) -> Tensor:
        """Return the embedding of one text from the hidden states of its tokens ``[T, H]``."""
        return {"mean": states.mean(0), "max": states.amax(0), "cls": states[0], "last": states[-1]}[self.pooling]


class RewardModel(TextKind):
    """The kind of a model that computes a score for each text. The scores rank the texts."""

    name, metric = "reward model", "Kendall's tau of scores"

    def judged(self, model: nn.Module, texts: Sequence[str]) -> list[Tensor]:
        """Return a list with one tensor ``[N]``: the scores of all N texts."""
        return [torch.cat([self._score(model, text) for text in texts])]

    def figures(self, given: list[Tensor], expected: list[Tensor]) -> TextFigures:
        """Return the mean of Kendall's tau over all rankings, and the relative error of the scores."""
        taus = torch.tensor([kendall_tau(*pair) for pair in zip(given, expected, strict=True)], dtype=torch.float64)
        deviation = float((torch.cat(given) - torch.cat(expected)).norm() / torch.cat(expected).norm())
        return _figures(self, taus, len(given[0]), {"relative error of scores": deviation})

    def _score(self, model: nn.Module, text: str, pair: str | None = None) -> Tensor:
        return self.outputs(model, text, pair).logits.flatten().double().cpu()


class Reranker(RewardModel):
    """The kind of a model that computes a score for a pair of a query and a text.

    The first words of some texts are the queries. For each query, the scores rank all texts.
    """

    name = "reranker"
    queries, words = 8, 8

    def judged(self, model: nn.Module, texts: Sequence[str]) -> list[Tensor]:
        """Return one tensor ``[N]`` for each query: the scores of all N texts for this query."""
        step = max(1, len(texts) // self.queries)
        queries = [" ".join(text.split()[: self.words]) for text in texts[::step][: self.queries]]
        return [torch.cat([self._score(model, query, text) for text in texts]) for query in queries]


class Classifier(TextKind):
    """The kind of a model that predicts a class for each text, or for each token."""

    name, metric = "classifier", "agreement of classes"

    def judged(self, model: nn.Module, texts: Sequence[str]) -> list[Tensor]:
        """Return a tensor of log-probabilities for each text.

        Its shape is ``[1, C]`` for C classes of the text, or ``[T, C]`` if each of T tokens has a class.
        """
        logits = (self.outputs(model, text).logits.double().cpu() for text in texts)
        return [torch.log_softmax(one.flatten(0, -2), -1) for one in logits]

    def figures(self, given: list[Tensor], expected: list[Tensor]) -> TextFigures:
        """Return the share of predictions with the same class in both models, and the mean KL divergence."""
        shares = torch.stack([(one.argmax(-1) == other.argmax(-1)).double().mean() for one, other in zip(given, expected, strict=True)])
        kl = [(other.exp() * (other - one)).sum(-1).mean() for one, other in zip(given, expected, strict=True)]
        return _figures(self, shares, len(given), {"KL divergence in nats": max(0.0, float(torch.stack(kl).mean()))})


def text_kind(path: Path, model_class: type, config: Any, tokenizer: Any, length: int | None = None) -> TextKind | None:
    """Return the kind of a checkpoint's model, or None if the model does not take whole texts.

    The class and the configuration of the model decide.

    A checkpoint of sentence-transformers and a model without a head are embedders. A model with a head for
    several classes is a classifier. A model with a head for one label is a reward model if models of its
    family are decoders; otherwise it is a reranker.

    Args:
        path: Directory of the checkpoint.
        model_class: The class of the model.
        config: The transformers config of the model.
        tokenizer: The tokenizer of the model.
        length: Largest number of tokens of a text; None for the limit of the checkpoint, at most 512.
    """
    name, labels = model_class.__name__, getattr(config, "num_labels", None)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (_sentence_length(path), context) if isinstance(n, int) and n > 0]
    length = min([length or 512, *limits])
    if getattr(model_class, "main_input_name", "input_ids") != "input_ids":
        return None
    if name.endswith(("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")) and isinstance(labels, int):
        if labels > 1:
            return Classifier(tokenizer, length)
        return (RewardModel if _is_of_decoders(config) else Reranker)(tokenizer, length)
    if getattr(config, "is_encoder_decoder", False):
        return None
    if any(kind.endswith("Pooling") for _, kind in sentence_modules(path)) or name.endswith(("Model", "ForTextEncoding")):
        return Embedder(tokenizer, length, _pooling(path))
    return None


def kendall_tau(one: Tensor, other: Tensor) -> float:
    """Return Kendall's tau-b of two rankings, between −1 and 1. Each ranking is given as scores ``[N]``.

    The result is 0 if all scores in ``one`` are equal, or all scores in ``other``.

    Source: Kendall 1945, The treatment of ties in ranking problems.

    >>> kendall_tau(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0]))
    0.3333333333333333
    """
    above = torch.ones(len(one), len(one), dtype=torch.bool).triu(1)
    signs = [(scores[:, None] - scores).sign()[above].double() for scores in (one, other)]
    norm = math.sqrt(float(signs[0].square().sum() * signs[1].square().sum()))
    return float((signs[0] * signs[1]).sum()) / norm if norm else 0.0


def _figures(kind: TextKind, values: Tensor, texts: int, others: dict[str, float]) -> TextFigures:
    count = len(values)
    mean = Mean(float(values.mean()), float(values.std() / math.sqrt(count)) if count > 1 else None)
    return TextFigures(kind.name, kind.metric, mean.value, mean.error, float(values.min()) if count > 1 else None, texts, others)


def _is_of_decoders(config: Any) -> bool:
    """Return whether transformers has a causal language model of a family, but no masked language model."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return bool(model_classes(AutoModelForCausalLM, config)) and not model_classes(AutoModelForMaskedLM, config)


def _pooling(path: Path) -> str:
    """Return the pooling method that a sentence-transformers checkpoint configures, or ``mean`` by default.

    Raises:
        CheckpointError: The file that configures the pooling is damaged, or lies outside the checkpoint.
        UnsupportedError: The pooling is not one of `_POOLINGS`.
    """
    folder = next((folder for folder, kind in sentence_modules(path) if kind.endswith("Pooling")), None)
    if folder is None:
        return "mean"
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        raise CheckpointError(f"'{path / 'modules.json'}' names the folder '{folder}' outside the checkpoint: fetch the file again")
    file = path / folder / "config.json"
    values = read_json(file)
    wanted = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    named = [values["pooling_mode"]] if isinstance(values.get("pooling_mode"), str) else []
    for name, end in _POOLINGS.items():
        if wanted == [f"pooling_mode_{end}"] or named in ([name], [end]):
            return name
    ways = ", ".join(named + wanted) or "nothing"
    raise UnsupportedError(
        f"'{file}' pools by {ways}, but quark evaluate can only pool by {', '.join(_POOLINGS)}: compare the model in Python"
    )


def _sentence_length(path: Path) -> int | None:
    """Return the limit of tokens that a sentence-transformers checkpoint configures, or None without a limit.

    Raises:
        CheckpointError: The file is damaged.
    """
    file = path / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.is_file() else None
    return length if isinstance(length, int) else None
