"""Images and sounds are read from files, bytes and arrays, or refused by their name."""

from __future__ import annotations

import builtins
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.errors import CalibrationError, MissingPluginError
from quark_workbench.data.media_files import loaded_image, loaded_sound

WAVE = np.array([0.0, 0.5, -0.5, 0.25, -1.0, 0.75], dtype=np.float64)


def wav(path: Path, width: int, channels: int = 1, rate: int = 16_000) -> Path:
    """Write the samples of `WAVE` as integers of a width; further channels are silent."""
    codes = np.round(WAVE * 2 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    silence = (128 if width == 1 else 0).to_bytes(width, "little")
    data = b"".join(int(code).to_bytes(width, "little", signed=width > 1) + silence * (channels - 1) for code in codes)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_wav_file_of_integers_needs_no_library(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "soundfile")
    path = wav(tmp_path / "a.wav", width)
    samples = loaded_sound(path, 16_000)
    assert samples.dtype == np.float32
    assert samples.tolist() == WAVE.tolist()
    assert loaded_sound(path.read_bytes(), 16_000).tolist() == WAVE.tolist()
    assert loaded_sound({"bytes": path.read_bytes(), "path": "a.wav"}, 16_000).tolist() == WAVE.tolist()


def test_channels_become_their_mean(tmp_path: Path) -> None:
    assert loaded_sound(wav(tmp_path / "a.wav", 2, channels=2), 16_000).tolist() == (WAVE / 2).tolist()


def test_an_array_has_its_sampling_rate() -> None:
    assert loaded_sound({"array": WAVE, "sampling_rate": 16_000}, 16_000).tolist() == WAVE.tolist()
    with pytest.raises(CalibrationError, match="has None samples a second"):
        loaded_sound({"array": WAVE}, 16_000)


def test_sounds_that_the_model_does_not_take_are_refused(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", 2, rate=22_050)
    with pytest.raises(
        CalibrationError, match=r"'.*a.wav' has 22050 samples a second, but the model needs 16000: convert the file, as with sox"
    ):
        loaded_sound(path, 16_000)
    with pytest.raises(CalibrationError, match=r"is 0\.0 s long, but the model accepts at most 0\.0001 s: cut the file into shorter ones"):
        loaded_sound(path, 22_050, 0.0001)
    with wave.open(str(tmp_path / "empty.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
    with pytest.raises(CalibrationError, match="has no sound"):
        loaded_sound(tmp_path / "empty.wav", 16_000)
    with pytest.raises(CalibrationError, match="a float is no sound"):
        loaded_sound(1.5, 16_000)


def test_other_formats_name_the_library_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "soundfile")
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    with pytest.raises(
        MissingPluginError,
        match=r"such as '.*a.flac', need the package 'soundfile', which is not installed. Install it: pip install soundfile",
    ):
        loaded_sound(tmp_path / "a.flac", 16_000)


def test_a_damaged_sound_is_named(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "a.flac").write_bytes(b"fLaC and nothing else")
    with pytest.raises(CalibrationError, match=r"'.*a.flac' cannot be read as a sound \("):
        loaded_sound(tmp_path / "a.flac", 16_000)


def test_images_name_the_library_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "PIL")
    with pytest.raises(MissingPluginError, match=r"images need the package 'PIL', which is not installed. Install it: pip install pillow"):
        loaded_image(tmp_path / "a.png")


def test_an_image_is_turned_upright_and_has_three_colours(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    image = images.new("L", (4, 2), 7)
    exif = images.Exif()
    exif[0x0112] = 6  # the camera was turned
    image.save(tmp_path / "a.jpg", exif=exif)
    for medium in (tmp_path / "a.jpg", (tmp_path / "a.jpg").read_bytes(), {"path": None, "bytes": (tmp_path / "a.jpg").read_bytes()}):
        loaded = loaded_image(medium)
        assert (loaded.mode, loaded.size) == ("RGB", (2, 4))
    assert loaded_image(image).mode == "RGB"


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    images.new("RGB", (64, 64)).save(buffer, "PNG")
    for content in (b"", b"text", buffer.getvalue()[:60]):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(CalibrationError, match=r"'.*a.png' cannot be read as an image \(.*\): convert it to PNG or JPEG"):
            loaded_image(tmp_path / "a.png")
    with pytest.raises(CalibrationError, match="a int is no image"):
        loaded_image(3)


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package be not installed."""
    real = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("quark_workbench.data.extras.import_module", refusing)
