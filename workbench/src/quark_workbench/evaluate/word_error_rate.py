"""The word error rate of speech models: wrong words in greedy transcripts ÷ spoken words.

A model with a decoder, such as Whisper, writes a transcript token by token. A CTC model, such as Wav2Vec2,
predicts a letter for each frame of the sound.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.torch_state import own_torch_state
from quark.errors import ConfigError
from quark.plugins.run_events import running
from quark_workbench.data.media_rows import MediaRow
from quark_workbench.data.processor import SampleProcessor
from quark_workbench.evaluate.logits import evaluating
from quark_workbench.evaluate.metrics import Mean
from quark_workbench.evaluate.sample_windows import SampleWindow

__all__ = ["rate_difference", "transcripts", "word_error_rate", "word_errors", "words_of"]

_APOSTROPHES = "'’"
_RESAMPLES = 1000
_LONGEST = 200
"""Largest number of tokens of a transcript, if the model states no limit."""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation.

    Apostrophes are removed. Any other punctuation mark separates words.

    >>> words_of("Don't stop – the well-known song: 'La'!")
    ['dont', 'stop', 'the', 'well', 'known', 'song', 'la']
    """
    letters = (letter for letter in text.lower() if letter not in _APOSTROPHES)
    return "".join(" " if unicodedata.category(letter)[0] in "PS" else letter for letter in letters).split()


def word_errors(transcript: str, text: str) -> tuple[int, int]:
    """Return the number of errors in a transcript, and the number of words in the spoken text.

    The number of errors is the smallest number of words that must be replaced, inserted or deleted to get the
    spoken text (Levenshtein 1966). Words are compared as `words_of` returns them.

    >>> word_errors("The cat sat, sat there.", "the cat sits there")
    (2, 4)
    """
    own, right = words_of(transcript), words_of(text)
    row = list(range(len(own) + 1))
    for number, word in enumerate(right, 1):
        before, row[0] = row[0], number
        for column, other in enumerate(own, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (word != other))
    return row[-1], len(right)


def word_error_rate(errors: Sequence[tuple[int, int]]) -> Mean:
    """Return the number of errors in all sentences ÷ the number of words, with a standard error.

    The standard error is the standard deviation over 1,000 bootstrap samples of the sentences (Efron 1979).
    Each call draws the same samples. For a single sentence, the standard error is None.

    Args:
        errors: A pair for each sentence, as `word_errors` returns it.

    Raises:
        ConfigError: The sentences have no words.
    """
    return _ratio(_counts(errors))


def rate_difference(errors: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Mean:
    """Return the word error rate of ``errors`` minus the word error rate of ``others``.

    Both must be for the same sentences. The standard error and the exceptions are as in `word_error_rate`.
    """
    counts = _counts(errors)
    counts[:, 0] -= _counts(others)[:, 0]
    return _ratio(counts)


def transcripts(model: nn.Module, processor: SampleProcessor, windows: Sequence[SampleWindow], samples: Sequence[Any]) -> list[str]:
    """Return a model's transcript of each sample, by greedy decoding.

    Args:
        model: A speech model: either one with a decoder, such as Whisper, or a CTC model, such as Wav2Vec2.
        processor: The processor of the model.
        windows: The samples as windows.
        samples: The samples. The language of a sample is used if the sample names it.
    """
    texts = []
    with own_torch_state(), running("evaluate", source=type(model).__name__) as events, evaluating(model):
        events.phase("evaluate")
        for window, sample in events.batches(zip(windows, samples, strict=True), of=windows):
            decode = _from_frames if processor.is_ctc else _transcript
            texts.append(decode(model, processor, window, sample))
    return texts


def _from_frames(model: Any, processor: SampleProcessor, window: SampleWindow, sample: Any) -> str:
    """Return the transcript that the most likely letters of all frames form.

    The tokenizer merges equal letters of neighbouring frames into one letter, and then removes blanks.
    Source: Graves et al. 2006, "Connectionist Temporal Classification", best path decoding.
    """
    tokenizer = processor.tokenizer
    frames: list[int] = model(**window.arguments(model)).logits[0].argmax(-1).tolist()
    silent = {*tokenizer.all_special_ids} - {getattr(tokenizer, "word_delimiter_token_id", None)}
    # Not skip_special_tokens: it removes blanks before equal letters are joined, and 'll' becomes 'l'.
    text: str = tokenizer.decode([tokenizer.pad_token_id if frame in silent else frame for frame in frames])
    return text


def _transcript(model: Any, processor: SampleProcessor, window: SampleWindow, sample: Any) -> str:
    inputs = {name: value for name, value in window.arguments(model).items() if not name.startswith("decoder_")}
    generation, options = model.generation_config, dict[str, Any]()
    if getattr(generation, "lang_to_id", None) and processor.is_multilingual:
        language = sample.language if isinstance(sample, MediaRow) else None
        options = {"language": language or "en", "task": "transcribe"}
    if generation.max_length in (None, 20):  # 20 is the default of transformers
        options["max_new_tokens"] = min(_LONGEST, getattr(model.config, "max_target_positions", _LONGEST) // 2)
    tokens = model.generate(**inputs, do_sample=False, num_beams=1, **options)
    text: str = processor.tokenizer.decode(tokens[0], skip_special_tokens=True)
    return text


def _counts(errors: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(errors, dtype=torch.float64).reshape(-1, 2)


def _ratio(counts: Tensor) -> Mean:
    """Return the sum of errors ÷ the sum of words, with a bootstrap standard error.

    ``counts [N, 2]`` has the number of errors and the number of words for each of N sentences.
    """
    total, n = counts.sum(0), len(counts)
    if not float(total[1]):
        raise ConfigError("the texts of the data have no words, so there is no word error rate: give rows with the spoken text")
    if n < 2:
        return Mean(float(total[0] / total[1]), None)
    drawn = counts[torch.randint(n, (_RESAMPLES, n), generator=torch.Generator().manual_seed(0))].sum(1)
    return Mean(float(total[0] / total[1]), float((drawn[:, 0] / drawn[:, 1].clamp(min=1)).std()))
