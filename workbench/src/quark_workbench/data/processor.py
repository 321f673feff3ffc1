"""The processor of a checkpoint, which turns samples with images or sounds into arguments of the model."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.shortages import refuse_failed_import
from quark.errors import CalibrationError, CheckpointError, QuarkError
from quark.models.hf.custom_code import refuse_code
from quark.models.hf.internals import model_classes
from quark.models.hf.json_files import read_json, reading, refuse_link_out
from quark.models.hf.model_class import model_class
from quark.models.hf.model_config import model_config
from quark.models.hf.tokenizer import load_tokenizer
from quark_workbench.data.media_files import loaded_image, loaded_sound
from quark_workbench.data.media_rows import MediaRow, media_of
from quark_workbench.data.samples import Sample

__all__ = ["SampleProcessor", "has_processor", "load_processor"]

_CONFIGURATIONS = ("processor_config.json", "preprocessor_config.json")
_SOUNDS = ("input_features", "input_values")
"""Main inputs of models that take sounds."""
_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "audio", "video") for end in ("id", "index"))
"""Attributes of a configuration with the id of the token that stands where an image or a sound belongs."""


def has_processor(path: Path) -> bool:
    """Return whether a checkpoint has a processor for images or sounds."""
    return any((path / name).is_file() for name in _CONFIGURATIONS)


def load_processor(path: Path, *, trust_remote_code: bool = False) -> SampleProcessor:
    """Return the `SampleProcessor` of a checkpoint.

    Args:
        path: Directory of the checkpoint.
        trust_remote_code: Whether code that comes with the checkpoint may run.

    Raises:
        CalibrationError: The checkpoint has no processor for images or sounds.
        CheckpointError: A file of the processor is damaged, or is a link to a file outside the checkpoint.
        UnsupportedError: The processor needs code from the checkpoint, and that code is not allowed to run.
        EnvironmentConflictError: The processor needs a library that cannot be imported, such as torchvision
            for videos.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor

    config = model_config(path, trust_remote_code=trust_remote_code)
    kind = model_class(config, path / "config.json", trust_remote_code=trust_remote_code).type
    if not has_processor(path):
        raise CalibrationError(
            f"the data hold images or sounds, but '{path}' has no processor for them ({' or '.join(_CONFIGURATIONS)}): use only "
            f"texts with a {kind.__name__}, or copy these files from the model's repository"
        )
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja", ".model"):
            refuse_link_out(file, path)
    hears = getattr(kind, "main_input_name", "") in _SOUNDS
    auto = AutoProcessor if tokenizer is not None else AutoFeatureExtractor if hears else AutoImageProcessor
    try:
        with reading(path, f"its processor is damaged; fetch {' or '.join(_CONFIGURATIONS)} again"):
            processor = auto.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except CheckpointError:
        if not trust_remote_code:
            for name in _CONFIGURATIONS:
                refuse_code(path / name)
        raise
    generation = path / "generation_config.json"
    is_multilingual = not generation.is_file() or read_json(generation).get("is_multilingual", True) is not False
    return SampleProcessor(processor, tokenizer, kind, config, is_multilingual)


@attrs.frozen(eq=False)
class SampleProcessor:
    """Turns samples into the arguments of a model.

    Attributes:
        processor: The processor of transformers.
        tokenizer: The tokenizer; None if the model reads no text.
        model_class: The class of the model.
        config: The transformers config of the model.
        is_multilingual: Whether a speech model can be told the language of a text.
        dtype: Dtype of floating-point arguments.
    """

    processor: Any
    tokenizer: Any
    model_class: type
    config: Any
    is_multilingual: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def placeholders(self) -> list[int]:
        """The ids of the tokens that stand in a text where an image or a sound belongs."""
        named = (getattr(self.config, name, None) for name in _PLACEHOLDERS)
        return sorted({one for one in named if isinstance(one, int)})

    @property
    def is_speech_to_text(self) -> bool:
        """Whether the model, like Whisper, encodes a sound and decodes a text."""
        is_decoding = bool(getattr(self.config, "is_encoder_decoder", False)) and "decoder_input_ids" in self._names()
        return is_decoding and getattr(self.model_class, "main_input_name", "") in _SOUNDS

    @property
    def is_ctc(self) -> bool:
        """Whether the model predicts a letter or a blank for each frame of speech (CTC), as Wav2Vec2 does."""
        from transformers import AutoModelForCTC

        return self.tokenizer is not None and self.model_class in model_classes(AutoModelForCTC, self.config)

    def batches(self, samples: Iterable[Sample], count: int, seed: int | None = None) -> list[dict[str, Tensor]]:
        """Return the arguments of the model for each sample. Each sample is a batch and is not cut.

        Args:
            samples: Samples, some of them with images or sounds.
            count: The largest number of samples.
            seed: Seed with which the samples are shuffled; None keeps their order.

        Raises:
            QuarkError: There is no sample, or `arguments` raises this error.
        """
        if seed is not None:
            samples = list(samples)
            random.Random(seed).shuffle(samples)
        batches = [self.arguments(sample, f"sample {number}") for number, sample in enumerate(islice(samples, count), 1)]
        if not batches:
            raise CalibrationError("the data hold no sample: give at least one")
        return batches

    def arguments(self, sample: Sample, name: str = "the sample") -> dict[str, Tensor]:
        """Return the arguments of the model's forward pass on one sample.

        Args:
            sample: A text, a chat or a row.
            name: Name of the sample, for messages.

        Raises:
            CalibrationError: The model does not take such a sample, or an image or a sound cannot be read.
            MissingPluginError: A package that reads images or sounds is not installed.
        """
        images = [loaded_image(medium) for medium in self._media(sample, "image", name)]
        sounds = self.sounds(sample, name)
        try:
            inputs = self._speech(sample, sounds[0], name) if self.is_speech_to_text else self._inputs(sample, images, sounds, name)
        except QuarkError:
            raise
        except Exception as error:  # the processor is code of transformers, or of the checkpoint
            refuse_failed_import(error, f"the processor cannot read {name}")
            raise CalibrationError(
                f"the processor of the {self.model_class.__name__} cannot read {name} ({type(error).__name__}: {error}). Give samples as "
                f"the model's repository describes"
            ) from error
        names = self._names()
        taken = {key: value for key, value in inputs.items() if key in names and isinstance(value, Tensor)}
        if not taken:
            raise CalibrationError(f"a {self.model_class.__name__} uses no part of {name}: give rows with the inputs that it reads")
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in taken.items()}

    def sounds(self, sample: Sample, name: str = "the sample") -> list[Any]:
        """Return the sounds of a sample, each as an array ``[N]``. The errors are as in `arguments`."""
        extractor = self._part("feature_extractor", "audio_processor")
        media = self._media(sample, "audio", name)
        if media and extractor is None:
            raise CalibrationError(f"{name} has a sound, but a {self.model_class.__name__} takes no sounds: leave out the sound")
        if not media and self.is_speech_to_text:
            raise CalibrationError(f"{name} has no sound, but a {self.model_class.__name__} needs one: give rows with the column 'audio'")
        seconds = getattr(extractor, "chunk_length", None) if self.is_speech_to_text else None
        return [loaded_sound(medium, extractor.sampling_rate, seconds) for medium in media]

    def prompt(self, language: str | None) -> list[int]:
        """Return the tokens with which the decoder of a speech model begins its output.

        Raises:
            CalibrationError: The tokenizer has no token for ``language``.
        """
        vocabulary = self.tokenizer.get_vocab()
        if language is not None and self.is_multilingual and f"<|{language}|>" not in vocabulary:
            raise CalibrationError(
                f"the model does not write the language '{language}': give its code in the column 'language', such as en"
            )
        names = [f"<|{language or 'en'}|>", "<|transcribe|>"] if self.is_multilingual else []
        return [
            self.config.decoder_start_token_id,
            *(vocabulary[name] for name in (*names, "<|notimestamps|>") if name in vocabulary),
        ]

    def _speech(self, sample: Sample, sound: Any, name: str) -> Mapping[str, Any]:
        """Return the arguments of a speech model: the features of the sound, and the ids for the decoder.

        The ids are those of the prompt and the spoken words.
        """
        if not isinstance(sample, MediaRow) or not sample.text.strip():
            raise CalibrationError(f"{name} does not say what is spoken: give rows with the columns 'audio' and 'text'")
        extractor = self._part("feature_extractor", "audio_processor")
        words = self.tokenizer(sample.text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = [*self.prompt(sample.language), *words, self.config.eos_token_id]
        inputs = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return {**inputs, "decoder_input_ids": torch.tensor([tokens])}

    def _inputs(self, sample: Sample, images: list[Any], sounds: list[Any], name: str) -> Mapping[str, Any]:
        """Return the arguments that the processor makes from a sample."""
        media: dict[str, Any] = {"images": images or None, "audio": sounds or None}
        rate = getattr(self._part("feature_extractor", "audio_processor"), "sampling_rate", None)
        options: dict[str, Any] = {"return_tensors": "pt"} | ({"sampling_rate": rate} if sounds else {})
        if self.tokenizer is None or self.processor is self._part("image_processor", "feature_extractor"):
            inputs: Mapping[str, Any] = self.processor(images or sounds, **options)
            return inputs
        text = "" if self.is_ctc else self._text(sample, len(images), len(sounds), name)  # text would become labels
        bos = getattr(self.tokenizer, "bos_token", None)
        if bos and text.startswith(bos):
            options["add_special_tokens"] = False  # the chat template has written BOS already
        given = {key: value for key, value in media.items() if value is not None} | ({"text": [text]} if text else {})
        inputs = self.processor(**given, **options)
        return inputs

    def _text(self, sample: Sample, images: int, sounds: int, name: str) -> str:
        """Return the text of a sample, with a placeholder for each image and sound.

        If there is a chat template, the template writes the placeholders.
        """
        if isinstance(sample, str):
            return sample
        chat: Any = sample
        if isinstance(sample, MediaRow):
            kinds = ["image"] * images + ["audio"] * sounds
            marks = [str(getattr(self.processor, f"{kind}_token", None) or "") for kind in kinds]
            if not all(marks) or any(mark in sample.text for mark in marks):
                return sample.text  # the model has no marks, or the text has them
            if self._template is None:
                return "\n".join([*marks, sample.text])
            chat = [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": sample.text}]}]
        if self._template is None:
            raise CalibrationError(
                f"{name} is a chat, but the processor has no chat template: give rows with the columns 'image' and 'text'"
            )
        chat = [{**message, "content": [*_parts_of(message["content"])]} for message in chat]
        text: str = self.processor.apply_chat_template(chat, tokenize=False)
        return text

    @property
    def _template(self) -> Any:
        return getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)

    def _media(self, sample: Sample, kind: str, name: str) -> list[Any]:
        """Return the images (``kind="image"``) or the sounds (``kind="audio"``) of a sample.

        Raises:
            CalibrationError: The model takes no images, or a part of a message names no file.
        """
        media = media_of(sample, kind)
        if None in media:
            raise CalibrationError(f"a message of {name} has a part of type '{kind}' without a path: add the key 'path'")
        if media and kind == "image" and self._part("image_processor") is None:
            raise CalibrationError(f"{name} has an image, but a {self.model_class.__name__} takes no images: leave out the image")
        return media

    def _part(self, *names: str) -> Any:
        """Return the first part of the processor with one of these names, or None if it has no such part.

        If the processor itself is an image processor or a feature extractor, return the processor.
        """
        from transformers import FeatureExtractionMixin, ImageProcessingMixin

        for name in names:
            if (part := getattr(self.processor, name, None)) is not None:
                return part
            if isinstance(self.processor, ImageProcessingMixin if name == "image_processor" else FeatureExtractionMixin):
                return self.processor
        return None

    def _names(self) -> set[str]:
        """Return the names of the arguments of the model's ``forward`` method."""
        forward: Any = getattr(self.model_class, "forward")  # noqa: B009 - for a class without one, it says so
        return {name for name, one in inspect.signature(forward).parameters.items() if one.kind is not one.VAR_KEYWORD}


def _parts_of(content: Any) -> Iterator[Any]:
    """Yield the parts of a message's content for a chat template. Images and sounds are left out."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        yield {key: value for key, value in part.items() if key in ("type", "text")} if isinstance(part, Mapping) else part
