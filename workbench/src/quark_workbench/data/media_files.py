"""Functions that load images and sounds from files, bytes or arrays."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.shortages import refuse_failed_import
from quark.errors import CalibrationError, MissingPluginError
from quark_workbench.data.extras import extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["loaded_image", "loaded_sound"]


def loaded_image(medium: Any) -> Any:
    """Return a Pillow image in RGB. A rotation that the file's EXIF data asks for is applied.

    Args:
        medium: As in `quark_workbench.data.media_rows.MediaRow`.

    Raises:
        CalibrationError: ``medium`` cannot be read as an image.
        MissingPluginError: Pillow is not installed.
    """
    images = extra("PIL.Image", "images")
    upright = extra("PIL.ImageOps", "images").exif_transpose
    if isinstance(medium, images.Image):
        return upright(medium).convert("RGB")
    source, name = _source(medium)
    if source is None:
        raise CalibrationError(f"a {type(medium).__name__} is no image: give the path of a file, its bytes, or an image of Pillow")
    try:
        with images.open(source) as image:
            return upright(image).convert("RGB")
    except Exception as error:  # each decoder has its own errors; too large images raise one too
        refuse_failed_import(error, f"{name} cannot be read as an image")
        raise CalibrationError(f"{name} cannot be read as an image ({error}): convert it to PNG or JPEG, or leave it out") from error


def loaded_sound(medium: Any, rate: int, most_seconds: float | None = None) -> NDArray[Any]:
    """Return the N samples of a sound as float32 ``[N]``, between −1 and 1. Channels are averaged.

    A WAV file of integers can be read without an optional package.

    Args:
        medium: As in `quark_workbench.data.media_rows.MediaRow`.
        rate: Sampling rate that the model needs, in samples per second.
        most_seconds: Largest length of a sound that the model accepts; None for any length.

    Raises:
        CalibrationError: ``medium`` cannot be read as a sound, is empty or too long, or has another sampling
            rate than ``rate``.
        MissingPluginError: The package that reads the format of the sound is not installed.
    """
    import numpy as np

    name = _source(medium)[1]
    if isinstance(medium, Mapping) and "array" in medium:
        samples, own_rate = np.asarray(medium["array"], dtype=np.float32), medium.get("sampling_rate")
    else:
        samples, own_rate = _decoded(medium)
    if own_rate != rate:
        raise CalibrationError(
            f"{name} has {own_rate} samples a second, but the model needs {rate}: convert the file, as with sox in.wav -r {rate} out.wav"
        )
    samples = samples.mean(-1) if samples.ndim == 2 else samples
    if samples.ndim != 1 or not len(samples):
        raise CalibrationError(f"{name} has no sound (shape {list(samples.shape)}): leave it out")
    if most_seconds is not None and len(samples) > most_seconds * rate:
        raise CalibrationError(
            f"{name} is {len(samples) / rate:.1f} s long, but the model accepts at most {most_seconds:g} s: cut the file into shorter ones"
        )
    return samples.astype(np.float32)


def _source(medium: Any) -> tuple[Any, str]:
    """Return a medium as a path or as a file in memory, and a name of the medium for messages.

    The first value is None if the medium is neither a path nor bytes.
    """
    path, content = medium, None
    if isinstance(medium, Mapping):
        path, content = medium.get("path"), medium.get("bytes")
    elif isinstance(medium, bytes):
        path, content = None, medium
    name = f"'{path}'" if isinstance(path, str | Path) else f"a {type(medium).__name__} of the data"
    if isinstance(content, bytes):
        return io.BytesIO(content), name
    return (Path(path) if isinstance(path, str | Path) else None), name


def _decoded(medium: Any) -> tuple[NDArray[Any], int]:
    """Return the samples ``[N, channels]`` and the sampling rate of a sound, which is a file or its bytes."""
    source, name = _source(medium)
    if source is None:
        raise CalibrationError(f"a {type(medium).__name__} is no sound: give the path of a file, its bytes, or array and sampling_rate")
    try:
        if (sound := _wav(source)) is not None:
            return sound
        if not isinstance(source, Path):
            source.seek(0)
        samples, rate = extra("soundfile", f"sounds that are no WAV files of integers, such as {name},").read(source, always_2d=True)
        return samples, int(rate)
    except MissingPluginError:
        raise
    except Exception as error:  # each decoder has its own errors
        refuse_failed_import(error, f"{name} cannot be read as a sound")
        raise CalibrationError(f"{name} cannot be read as a sound ({error}): convert it to WAV, or leave it out") from error


def _wav(source: Any) -> tuple[NDArray[Any], int] | None:
    """Return the samples and the sampling rate of a WAV file of integers, or None for any other file."""
    import numpy as np

    try:
        with wave.open(str(source) if isinstance(source, Path) else source, "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    octets = np.frombuffer(data[: len(data) // (width * channels) * width * channels], dtype=np.uint8).reshape(-1, width)
    whole = np.zeros((len(octets), 4), dtype=np.uint8)
    whole[:, 4 - width :] = octets
    if width == 1:  # only samples of 8 bits are unsigned
        whole[:, 3] ^= 0x80
    return whole.view("<i4")[:, 0].reshape(-1, channels) / np.float32(2**31), rate
