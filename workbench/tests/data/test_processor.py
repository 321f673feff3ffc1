"""Samples become the arguments that the processor of a model makes of them, or are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import transformers

from quark.errors import CalibrationError, CheckpointError, EnvironmentConflictError
from quark_tiny_model import tiny_model_dir
from quark_workbench.data import read_samples
from quark_workbench.data.media_rows import MediaRow
from quark_workbench.data.processor import SampleProcessor, load_processor
from tests.kit.media_models import (
    CHATTING,
    HEARING,
    SEEING,
    SPELLING,
    media_checkpoint,
    read_no_videos,
    write_image,
    write_images,
    write_sound,
    write_sounds,
)
from tests.kit.model_classes import random_model

HEARS = "WhisperForConditionalGeneration"


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.one_in(2)
def test_a_chat_with_images_becomes_what_the_processor_makes_of_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    read_no_videos(monkeypatch)
    path = media_checkpoint(name, tmp_path / "model")
    samples = list(read_samples(write_images(tmp_path / "data", 2)))
    batches = load_processor(path).batches(samples, 2)
    processor = transformers.AutoProcessor.from_pretrained(path)
    takes = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    for batch, sample in zip(batches, samples, strict=True):
        chat: Any = copy.deepcopy(sample)
        for message in chat:
            for part in message["content"]:
                part |= {"path": str(part["path"])} if "path" in part else {}
        expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        assert batch.keys() == {key for key in expected if key in ("token_type_ids", "mm_token_type_ids", *batch)}
        assert "pixel_values" in batch
        for key, value in batch.items():
            assert torch.equal(value, expected[key]), key
        assert torch.isfinite(takes(**batch).logits).all()
    assert not torch.equal(batches[0]["pixel_values"], batches[1]["pixel_values"])


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_a_row_with_an_image_gets_the_mark_of_the_model(name: str, has_template: bool, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    processor = load_processor(media_checkpoint(name, tmp_path / "model"))
    if not has_template:
        processor.processor.chat_template = processor.tokenizer.chat_template = None
    image = write_image(tmp_path / "a.png")
    mark = processor.processor.image_token
    rows = [MediaRow("A cat.", images=(image,)), MediaRow(f"user: {mark}A cat.\n" if has_template else f"{mark}\nA cat.", images=(image,))]
    without, given = processor.batches(rows, 2)
    assert int((without["input_ids"] == processor.placeholders[0]).sum()) == (16 if name.startswith("Llava") else 4)
    assert torch.equal(without["input_ids"], given["input_ids"])
    assert set(processor.arguments("Only text.")) >= {"input_ids"}


def test_a_sound_becomes_features_and_the_tokens_of_its_words(tmp_path: Path) -> None:
    path = media_checkpoint(HEARS, tmp_path / "model")
    processor = load_processor(path)
    batches = processor.batches(read_samples(write_sounds(tmp_path / "data", 2)), 2)
    tokenizer, extractor = processor.tokenizer, transformers.AutoFeatureExtractor.from_pretrained(path)
    for number, batch in enumerate(batches):
        assert batch.keys() == {"input_features", "decoder_input_ids"}
        text = tokenizer.decode(batch["decoder_input_ids"][0])
        assert text == f"<hear><|en|>In the beginning, {number + 2} birds sang.<|endoftext|>"
        samples = (torch.randn(8000, generator=torch.Generator().manual_seed(number)) * 3000).to(torch.int16) / 32768
        expected = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt")["input_features"]
        assert torch.equal(batch["input_features"], expected)
    half = attrs.evolve(processor, dtype=torch.bfloat16).batches(read_samples(tmp_path / "data/sounds.jsonl"), 1)[0]
    assert {key: value.dtype for key, value in half.items()} == {"input_features": torch.bfloat16, "decoder_input_ids": torch.int64}


@pytest.mark.parametrize("name", CHATTING)
def test_a_model_that_hears_and_chats_gets_marks_and_features(name: str, tmp_path: Path) -> None:
    path, sound = media_checkpoint(name, tmp_path / "model"), write_sound(tmp_path / "a.wav")
    processor = load_processor(path)
    chat = [{"role": "user", "content": [{"type": "audio", "path": sound}, {"type": "text", "text": "What was it?"}]}]
    row, said = processor.batches([MediaRow("What was it?", sounds=(sound,)), chat], 2)
    assert set(row) == {"input_ids", "attention_mask", "input_features", "feature_attention_mask"}
    assert all(torch.equal(value, said[key]) for key, value in row.items())
    assert int((row["input_ids"] == processor.placeholders[0]).sum()) == 12, "a quarter of 50 frames"
    model = getattr(transformers, name).from_pretrained(path).eval()
    assert torch.isfinite(model(**row).logits).all()


@pytest.mark.parametrize("rendered", ["<bos>user: Hello.", "user: Hello."])
def test_a_start_token_that_the_template_writes_is_not_written_again(rendered: str) -> None:
    given: list[dict[str, Any]] = []

    class Processor:
        chat_template = "a template"

        def apply_chat_template(self, chat: Any, tokenize: bool) -> str:
            return rendered

        def __call__(self, **arguments: Any) -> dict[str, Any]:
            given.append(arguments)
            return {"input_ids": torch.tensor([[1]])}

    tokenizer = SimpleNamespace(bos_token="<bos>")
    processor = SampleProcessor(Processor(), tokenizer, transformers.LlamaForCausalLM, transformers.LlamaConfig())
    processor.arguments([{"role": "user", "content": "Hello."}])
    no_more = {"add_special_tokens": False} if rendered.startswith("<bos>") else {}
    assert given == [{"text": [rendered], "return_tensors": "pt", **no_more}]


def test_a_chat_without_images_is_read_beside_others(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    processor = load_processor(media_checkpoint("LlavaForConditionalGeneration", tmp_path / "model"))
    tokens = processor.arguments([{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}])["input_ids"]
    assert processor.tokenizer.decode(tokens[0]) == "user: Hello.\nassistant: Good day.\n"


def test_a_model_of_one_language_gets_no_language(tmp_path: Path) -> None:
    path = media_checkpoint(HEARS, tmp_path / "model")
    assert load_processor(path).prompt(None) == [1028, 1029]
    with pytest.raises(CalibrationError, match="does not write the language 'xx'"):
        load_processor(path).prompt("xx")
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"is_multilingual": False}))
    assert load_processor(path).prompt("xx") == [1028]


def test_a_seed_shuffles_samples_and_a_count_bounds_them(tmp_path: Path) -> None:
    processor = load_processor(media_checkpoint(HEARS, tmp_path / "model"))
    write_sounds(tmp_path / "data", 6)
    ordered, first, shuffled = (
        [
            processor.tokenizer.decode(b["decoder_input_ids"][0])
            for b in processor.batches(read_samples(tmp_path / "data/sounds.jsonl"), n, seed)
        ]
        for n, seed in ((9, None), (2, None), (9, 1))
    )
    assert first == ordered[:2]
    assert shuffled != ordered
    assert sorted(shuffled) == sorted(ordered)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"images": (b"",)}, None),
        ({"sounds": ("fast.wav",), "text": "a"}, r"fast.wav' has 22050 samples a second, but the model needs 16000"),
        ({"sounds": ("long.wav",), "text": "a"}, r"long.wav' is 2.0 s long, but the model accepts at most 1 s"),
        ({"sounds": ("none.wav",), "text": "a"}, "none.wav' cannot be read as a sound|need the package 'soundfile'"),
        ({"sounds": ("right.wav",)}, "does not say what is spoken: give rows with the columns 'audio' and 'text'"),
        ({"text": "a"}, "has no sound, but a WhisperForConditionalGeneration needs one: give rows with the column 'audio'"),
    ],
)
def test_a_speech_model_refuses_what_it_does_not_hear(row: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    processor = load_processor(media_checkpoint(HEARS, tmp_path / "model"))
    write_sound(tmp_path / "fast.wav", rate=22_050)
    write_sound(tmp_path / "long.wav", seconds=2)
    write_sound(tmp_path / "right.wav")
    row = {key: tuple(tmp_path / one for one in value) if key == "sounds" else value for key, value in row.items()}
    with pytest.raises(
        (CalibrationError, ImportError), match=said or "has an image, but a WhisperForConditionalGeneration takes no images"
    ):
        processor.arguments(MediaRow(**row))


def test_a_model_of_texts_has_no_processor() -> None:
    with pytest.raises(CalibrationError, match=r"has no processor for them .*: use only texts with a LlamaForCausalLM, or copy"):
        load_processor(tiny_model_dir())


def test_a_damaged_processor_is_named(tmp_path: Path) -> None:
    path = media_checkpoint(HEARS, tmp_path / "model")
    (path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"(?s)preprocessor_config.json"):
        load_processor(path)


def test_a_library_that_a_processor_needs_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    if transformers.utils.is_torchvision_available():
        pytest.skip("torchvision is installed")
    with pytest.raises(EnvironmentConflictError, match="requires the Torchvision library"):
        load_processor(media_checkpoint("Qwen2VLForConditionalGeneration", tmp_path / "model"))


def test_what_the_processor_refuses_is_refused_by_its_sample(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    processor = load_processor(media_checkpoint("LlavaForConditionalGeneration", tmp_path / "model"))
    mark = "<image>"
    with pytest.raises(CalibrationError, match=r"cannot read sample 2 \(ValueError: .*\)\. Give samples as the model's repository"):
        processor.batches(["Only text.", MediaRow(mark * 2, images=(write_image(tmp_path / "a.png"),))], 2)


@pytest.mark.parametrize("name", SPELLING)
def test_the_text_of_a_sound_is_no_input_of_a_ctc_model(name: str, tmp_path: Path) -> None:
    processor = load_processor(media_checkpoint(name, tmp_path / "model"))
    batch = processor.arguments(MediaRow("In the beginning.", sounds=(write_sound(tmp_path / "a.wav"),)))
    assert {key: value.shape for key, value in batch.items()} == {"input_values": (1, 8000)}
    assert (processor.is_ctc, processor.is_speech_to_text) == (True, False)
    assert not load_processor(media_checkpoint(HEARS, tmp_path / "whisper")).is_ctc


@pytest.mark.parametrize("name", ["ViTForImageClassification", "Wav2Vec2ForCTC"])
def test_a_model_without_text_gets_its_images_or_sounds(name: str, tmp_path: Path) -> None:
    model: Any = random_model(name)
    model.save_pretrained(tmp_path / "model")
    if name.startswith("ViT"):
        pytest.importorskip("PIL")
        settings: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
        row = MediaRow("Not read.", images=(write_image(tmp_path / "a.png"),))
    else:
        settings = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16_000}
        row = MediaRow("Not read.", sounds=(write_sound(tmp_path / "a.wav"),))
    (tmp_path / "model/preprocessor_config.json").write_text(json.dumps(settings))
    batch = load_processor(tmp_path / "model").arguments(row)
    assert list(batch) == [model.main_input_name]
    assert torch.isfinite(model(**batch).logits).all()


def test_every_class_of_the_kit_is_of_one_kind() -> None:
    assert not SEEING.keys() & HEARING.keys()
