"""Functions that copy the companions of a checkpoint.

Companions are the tokenizer, the generation settings and other files beside the weights.
"""

from __future__ import annotations

import filecmp
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.files import leads_out
from quark.base.log import get_logger
from quark.base.names import folded
from quark.errors import OutputError, QuarkError
from quark.models.hf.custom_code import code_of, sentence_modules
from quark.models.hf.internals import directory_of, source_of
from quark.models.hf.json_files import read_json

if TYPE_CHECKING:
    from torch import nn

    from quark.checkpoint.exporter import Tokenizer

_LARGEST, _MOST_BYTES = 100_000_000, 1 << 30
"""Maximum number of bytes of one companion, and of all companions. The largest vocabularies have 33 MB."""
_MOST_FILES, _DEEPEST = 1000, 3
"""Maximum number of companions, and maximum depth of the folders that contain them."""
_OF_THE_RESULT = re.compile(r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
"""Names of files that are never copied, because each export has such files of its own."""
_OTHER_FORM, _PROGRAM = "weights in another form", "a program or archive that no config names as code of the model"
_LINK, _UNREADABLE = "a link out of the checkpoint", "cannot be read"
_LARGE, _MANY, _DEEP = "too large", "too many files", "in too deeply nested folders"
_RUNS_CODE = "weights of a part of the model in a form that may run code; convert them to safetensors"
_LOST = {_LINK, _LARGE, _MANY, _DEEP, _UNREADABLE, _RUNS_CODE}
"""Those reasons for leaving out a file with which the result may lack something that it needs."""
_QUANTIZED, _OF_A_RUN = "says how the source is quantized", "about the run or training that made the source"
_WRONG = {
    "*.index.json": _OTHER_FORM,
    "params.json": "the configuration of weights in another form",
    "adapter_config.json": "of an adapter: transformers would look for its weights",
    "hf_quant_config.json": _QUANTIZED,
    "quant*_config.json": _QUANTIZED,
    "recipe.yaml": _QUANTIZED,
    "quark_report.*": _OF_A_RUN,
    "quark_run.json": _OF_A_RUN,
    "runs/": _OF_A_RUN,
    "wandb/": _OF_A_RUN,
    "logs/": _OF_A_RUN,
}
"""Dictionary from pattern to the reason why such files or folders are wrong beside a quantized model."""
_WEIGHTS = {
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".joblib", ".npy", ".npz"),
    *(".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".ggml", ".tflite", ".pb", ".engine", ".nemo"),
}
_PROGRAMS = {".py", ".pyc", ".sh", ".bat", ".ps1", ".so", ".dll", ".dylib", ".exe"}
_BINARIES = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"PK\3\4", b"\x7fELF", b"GGUF", b"\x89HDF")
"""First bytes of serialized objects, archives, programs and weights. They show the form despite the file
name.
"""


def save_companions(model: nn.Module, directory: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write the tokenizer, the generation settings and other companions of a model.

    The companions of the float checkpoint from which the model was loaded are copied. They include the Python
    files that the configs of this checkpoint name, and the modules that these files import
    (`quark.models.hf.custom_code.code_of`).

    Args:
        model: The model. If it is not a transformers model, only the tokenizer is written.
        directory: The directory to write to. Existing files stay.
        tokenizer: A tokenizer to write instead of the one beside the float checkpoint.

    Raises:
        OutputError: The tokenizer cannot be saved.
    """
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(directory)
        except OSError:
            raise
        except Exception as error:  # the caller's object may raise anything
            reason = f"({type(error).__name__}: {error})"
            raise OutputError(
                f"the tokenizer, a {type(tokenizer).__name__}, cannot be saved {reason}. Give another tokenizer, or None"
            ) from error
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_file"):
        return
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    name, source = source_of(config), directory_of(config)
    if source is None:
        if name:
            get_logger(__name__).warning(
                f"The model was loaded from '{name}', which is no directory, and the hub cache (HF_HOME) has no version or several "
                "versions of it. So the result lacks the tokenizer, other files, and tensors that the model class does not use. Load the "
                "model from a directory, or copy the files"
            )
    elif _is_of_model(source, config.model_type):
        copied = copy_companions(source, directory)
        if not Path(name).is_dir():
            get_logger(__name__).info(f"Copied these files of '{name}' from the hub cache ('{source}'): {folded(copied) or 'none'}.")
    else:
        get_logger(__name__).warning(
            f"The model was loaded from '{source}', which has no config.json of the model type '{config.model_type}'. So the tokenizer and "
            "other files of this directory are not in the result. Copy them if they belong to the model"
        )


def _is_of_model(source: Path, model_type: str) -> bool:
    """Return whether ``source`` is a checkpoint of this model type, or of a model with a part of this type.

    This check is necessary, because ``_name_or_path`` in a ``config.json`` can name any directory. If a part
    of a model was taken out, the config of this part still names the checkpoint of the whole model.
    """
    values = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    return model_type in (part.get("model_type") for part in (values, *values.values()) if isinstance(part, dict))


def copy_companions(source: Path, directory: Path) -> list[str]:
    """Copy the companions of a checkpoint (`companions_of`), and return the names of the copied files.

    The function logs which files and folders it does not copy, with the reasons.

    Args:
        source: Directory of the checkpoint.
        directory: The directory to copy to. Existing files stay.
    """
    found = companions_of(source)
    copied = []
    for name in found.files:
        if not (directory / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile((source / name).resolve(), directory / name)
            copied.append(name)
    names_of: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        names_of.setdefault(reason, []).append(name)
    if names_of:
        text = "; ".join(f"{folded(names)} ({reason})" for reason, names in names_of.items())
        is_lost = bool(_LOST & names_of.keys())
        get_logger(__name__).log(logging.WARNING if is_lost else logging.INFO, f"Not copied from '{source}' to the result: {text}.")
    return copied


@attrs.frozen
class Companions:
    """The files beside the weights of a checkpoint.

    Attributes:
        files: Names of the files that belong to the model, relative to the checkpoint.
        left_out: A dictionary from the name of a file or folder to the reason why it is not copied.
    """

    files: tuple[str, ...]
    left_out: Mapping[str, str]


def companions_of(source: Path) -> Companions:
    """Return the companions of a checkpoint. An export of the same model should contain them, too.

    Companions are all small files, including files in folders. Weights and files that would be wrong beside a
    quantized model are not companions. Hidden files are not companions either, because they belong to tools.
    If ``modules.json`` of sentence-transformers names a folder, the folder is a part of the model, and the
    safetensors files in it are companions. Python files are companions if a config names them
    (`quark.models.hf.custom_code.code_of`).
    """
    left_out: dict[str, str] = {}
    files: list[str] = []
    code, parts = set(code_of(source)), {path for path, _ in sentence_modules(source)}
    size, waiting = 0, [source]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(source).as_posix()
            if path.name.startswith((".", "__pycache__")) or _OF_THE_RESULT.fullmatch(name):
                continue
            reason = _why_not(path, name, source, code, parts)
            if reason is None and path.is_dir():
                waiting.append(path)
                continue
            size += 0 if reason else path.stat().st_size
            if reason is None and (len(files) == _MOST_FILES or size > _MOST_BYTES):
                reason = _MANY
            if reason is None:
                files.append(name)
            elif len(left_out) < _MOST_FILES:
                left_out[name] = reason
            if reason == _MANY:
                waiting.clear()
    return Companions(tuple(files), left_out)


def copied_companions(out: Path, source: Path | None) -> set[str]:
    """Return the names of files in ``out`` that are exact copies of companions in the checkpoint ``source``.

    The result also includes the names of those folders in ``out`` that contain only such copies.
    """
    if source is None or not source.is_dir() or not out.is_dir():
        return set()
    try:
        known = set(companions_of(source).files)
    except QuarkError:  # reading the source reports the error
        return set()
    copies = set()
    for path in out.iterdir():
        files = [inner for inner in path.rglob("*") if not inner.is_dir() or inner.is_symlink()] if path.is_dir() else [path]
        names = [file.relative_to(out).as_posix() for file in files]
        if files and known.issuperset(names) and not any(file.is_symlink() for file in (path, *files)):
            copies |= {path.name} if all(filecmp.cmp(out / name, source / name, shallow=False) for name in names) else set()
    return copies


def _why_not(path: Path, name: str, source: Path, code: Collection[str], parts: Collection[str]) -> str | None:
    """Return why a file or folder of a checkpoint is not copied, or None if it belongs to the model."""
    try:
        return _why_wrong(path, name, source, code, parts)
    except OSError:
        return _UNREADABLE


def _why_wrong(path: Path, name: str, source: Path, code: Collection[str], parts: Collection[str]) -> str | None:
    """Return the same as `_why_not`, but raise OSError if the file or folder cannot be read."""
    if path.is_symlink() and (path.is_dir() or leads_out(path, source)):
        return _LINK
    if path.is_dir():
        is_other = name not in parts and any(p.suffix.lower() in (*_WEIGHTS, ".safetensors") for p in path.iterdir())
        return _WRONG.get(f"{path.name}/") or (_OTHER_FORM if is_other else _DEEP if name.count("/") >= _DEEPEST else None)
    if not path.is_file():
        return "not a regular file"
    if wrong := next((reason for pattern, reason in _WRONG.items() if fnmatchcase(path.name, pattern)), None):
        return wrong
    suffix, is_of_part = path.suffix.lower(), name.rpartition("/")[0] in parts and "/" in name
    with path.open("rb") as file:
        first = file.read(4)
    if suffix in _WEIGHTS or (suffix == ".safetensors" and not is_of_part):
        return _RUNS_CODE if is_of_part else _OTHER_FORM
    is_binary = suffix != ".safetensors" and first.startswith(_BINARIES)  # a safetensors file begins with a size, which can be any bytes
    if is_binary or (name not in code and (suffix in _PROGRAMS or first.startswith(b"#!"))):
        return _PROGRAM
    return _LARGE if path.stat().st_size > _LARGEST else None
