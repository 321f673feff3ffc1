"""Inputs and quality measures for each kind of model in `benchmarks.defaults`.

=================  ==================================  =================================================
kind               reads                               measured by
=================  ==================================  =================================================
language model     windows of a text                   KL divergence of its tokens, and perplexity
sentence embedder  windows of a text                   1 − cosine of its embedding, a mean over tokens
speech recognizer  words of a window, spoken           KL divergence of its tokens, and perplexity
=================  ==================================  =================================================

The KL divergence and the cosine compare a model with the float model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speech import RATE, spoken, words_of
from benchmarks.texts import windows
from quark_workbench.evaluate.logits import NextTokens, evaluating, next_token_logits
from quark_workbench.evaluate.predictions import Predictions
from quark_workbench.evaluate.windows import Windows

__all__ = ["ModelKind", "kind_of"]

Batch = Mapping[str, Tensor]
Values = dict[str, dict[str, list[float]]]


class ModelKind(ABC):
    """Makes the inputs of one model, and measures its quantized copies.

    Args:
        model: The float model.
        path: Directory of the float model.
        tokenizer: Tokenizer of the float model.
        folder: Directory of the texts.
    """

    def __init__(self, model: Any, path: Path, tokenizer: Any, folder: Path) -> None:
        self.reference, self.path, self.tokenizer, self.folder = model, path, tokenizer, folder

    def calibration(self, texts: str, sequences: int, length: int) -> list[Batch]:
        """Return sequences from the first halves of texts, whose names are joined by ``+``.

        Each name stands for the same number of sequences, so a text that is named twice gives twice as many.
        """
        kinds = texts.split("+")
        counts = Counter(kinds[number % len(kinds)] for number in range(sequences))
        return [batch for text, count in counts.items() for batch in self.batches(text, 0, count, length)]

    def batches(self, text: str, half: int, count: int, length: int) -> list[Batch]:
        """Return the model's arguments for sequences of one half of a text, one batch for each sequence.

        `benchmarks.texts.windows` describes the arguments ``half``, ``count`` and ``length``.
        """
        return [self.batch(row, text) for row in windows(self.tokenizer, self.folder / f"{text}.txt", half, count, length)]

    def batch(self, tokens: Tensor, text: str) -> Batch:
        """Return the model's arguments for one window, ``[T]`` tokens of the text ``text``."""
        return {"input_ids": tokens[None]}

    @abstractmethod
    def values(self, models: Mapping[str, nn.Module], batches: Sequence[Batch]) -> Values:
        """Return, for each setting, a dictionary from measure to a list with one value per sequence.

        ``models`` maps settings to models. The float model has the setting ``"float"`` if it has measures of
        its own.
        """


class LanguageModel(ModelKind):
    """Reads windows of a text, and predicts the token after each token."""

    def values(self, models: Mapping[str, nn.Module], batches: Sequence[Batch]) -> Values:
        """Return the KL divergence and the negative log-likelihood of each sequence, in nats."""
        values: Values = {"float": {"nll": []}} | {name: {"kl": [], "nll": []} for name in models}
        with evaluating(self.reference, *models.values()):
            for batch in batches:
                scored = self.scored(batch)
                expected = self.predicted(self.reference, batch, scored)
                for name, model in models.items():
                    predictions = Predictions()
                    predictions.add(scored, self.predicted(model, batch, scored), expected)
                    values[name]["kl"].append(_mean(predictions.column("kl")))
                    values[name]["nll"].append(-_mean(predictions.column("log_q")))
                values["float"]["nll"].append(-_mean(predictions.column("log_p")))
        return values

    def scored(self, batch: Batch) -> Windows:
        """Return the tokens of a batch, and which of them the model predicts."""
        return Windows(batch["input_ids"], torch.ones(1, dtype=torch.int64))

    def predicted(self, model: nn.Module, batch: Batch, scored: Windows) -> NextTokens:
        """Return the predictions of a model for the tokens ``scored``."""
        return next_token_logits(model, scored)


class SpeechRecognizer(LanguageModel):
    """Transcribes spoken words, as Whisper does."""

    def __init__(self, model: Any, path: Path, tokenizer: Any, folder: Path) -> None:
        from transformers import AutoFeatureExtractor

        super().__init__(model, path, tokenizer, folder)
        self._features = AutoFeatureExtractor.from_pretrained(path)

    def batch(self, tokens: Tensor, text: str) -> Batch:
        """Return the audio of the words, and the decoder's start tokens followed by the words' tokens."""
        words, language = words_of(self.tokenizer.decode(tokens, skip_special_tokens=True)), "de" if text == "german" else "en"
        heard = self._features(spoken(words, language).numpy(), sampling_rate=RATE, return_tensors="pt").input_features
        tokens_of_words = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        decoder = [*self._start(language), *tokens_of_words, self.reference.config.eos_token_id]
        return {"input_features": heard.to(self.reference.dtype), "decoder_input_ids": torch.tensor([decoder])}

    def _start(self, language: str) -> list[int]:
        """Return the start tokens of a transcription."""
        generation, vocabulary = self.reference.generation_config, self.tokenizer.get_vocab()
        names = (f"<|{language}|>", "<|transcribe|>", "<|notimestamps|>")
        return [generation.decoder_start_token_id, *(vocabulary[name] for name in names if name in vocabulary)]

    def scored(self, batch: Batch) -> Windows:
        """Return the decoder's tokens. The model does not predict the start tokens."""
        tokens = batch["decoder_input_ids"]
        return Windows(tokens, torch.tensor([len(self._start("en"))]))

    def predicted(self, model: nn.Module, batch: Batch, scored: Windows) -> NextTokens:
        """Return the predictions of a model for the audio of a batch."""
        device = next(model.parameters()).device
        logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits[:, :-1]
        return NextTokens(
            logits[scored.scored.to(device)], scored.tokens[:, 1:].cpu()[scored.scored], torch.zeros(int(scored.scored.sum()))
        )


class SentenceEmbedder(ModelKind):
    """Embeds a window of a text. The embedding is the mean of the last hidden states."""

    def values(self, models: Mapping[str, nn.Module], batches: Sequence[Batch]) -> Values:
        """Return 1 − the cosine similarity of each sequence's embedding and the float model's embedding."""
        values: Values = {name: {"distance": []} for name in models}
        with evaluating(self.reference, *models.values()):
            for batch in batches:
                expected = self._embedding(self.reference, batch)
                for name, model in models.items():
                    cosine = torch.cosine_similarity(self._embedding(model, batch), expected, dim=0)
                    values[name]["distance"].append(float(f"{max(float(1 - cosine), 0.0):.5g}"))
        return values

    def _embedding(self, model: nn.Module, batch: Batch) -> Tensor:
        device = next(model.parameters()).device
        return model(**{name: tensor.to(device) for name, tensor in batch.items()}).last_hidden_state[0].double().mean(0).cpu()


def kind_of(model: Any) -> type[ModelKind]:
    """Return the kind of a transformers model.

    Raises:
        ValueError: The model is of none of the kinds in this module.
    """
    if model.main_input_name == "input_features" and model.can_generate():
        return SpeechRecognizer
    if model.main_input_name == "input_ids" and not model.config.is_encoder_decoder:
        return LanguageModel if model.can_generate() else SentenceEmbedder
    raise ValueError(f"a {type(model).__name__} is neither a language model, nor a sentence embedder, nor a speech recognizer")


def _mean(column: Tensor) -> float:
    return float(f"{float(column.mean()):.5g}")
