"""Checkpoints in Hugging Face form: the structure on meta tensors, the model, its tokenizer, text for calibration.

transformers is imported inside the functions: importing this module, and with it ``quark.torch``, does not pay for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.errors import CalibrationError, CheckpointError, ConfigError
from quark.hf.foreign_errors import reading
from quark.hf.json_files import bounded_bytes, read_json
from quark.hf.modeling import known_to_transformers
from quark.hf.shards import check_shards, refuse_codes
from quark.hf.unpacking import unpack_all
from quark.names import folded

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MOST_PARTS = 10_000  # layers, or experts of a layer: of a model that can be built in time
# An id of eight digits in tokenizer.json: the vocabulary is laid out up to the largest, whatever time and memory that takes.
_FAR_ID = re.compile(rb'":(?<!length":)\s*(\d{8,18})\s*[,}]')
_NO_MODEL = "no model can be built of it; it is damaged, fetch it again"


def model_config(path: Path) -> Any:
    """The transformers config of a checkpoint; the model class that a plugin brings for it is imported first.

    Raises:
        CheckpointError: There is no such directory, its config.json is missing or damaged, or nobody knows its model type.
        PluginError: The plugin's module cannot be imported.
    """
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        what = "there is no such directory" if not path.is_dir() else "it has no config.json"
        raise CheckpointError(f"'{path}' is not a checkpoint in Hugging Face form: {what}")
    file = path / "config.json"
    _refuse_endless(read_json(file), file)
    damaged = "it is damaged, or of a model that this release of transformers does not know, or needs code of its own, which is never run"
    with known_to_transformers(file), reading(file, damaged):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def _refuse_endless(config: Any, file: Path) -> None:
    """Raise if a model of that config.json would take for ever to build, weights or none."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            _refuse_endless(value, file)
        elif isinstance(value, int) and value > _MOST_PARTS and re.search("layer|expert|depth", key):
            raise CheckpointError(f"'{file}' says {key} = {value:,}, and no model has more than {_MOST_PARTS:,} of such: it is damaged")


def auto_class(config: Any) -> Any:
    """The Auto class of transformers whose models include the one that a checkpoint's config names.

    That is the one for text, or, for a model of several parts, the one for images and text; what no ``architectures`` decides is the first
    that knows the config, text before images.

    Args:
        config: A transformers config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    named = set(config.architectures or ())
    known = [auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(config) in auto._model_mapping]
    exact = [auto for auto in known if named & _class_names(auto._model_mapping[type(config)])]
    return [*exact, *known, AutoModelForCausalLM][0]


def _class_names(classes: Any) -> set[str]:
    return {c.__name__ for c in (classes if isinstance(classes, list | tuple) else (classes,))}


def meta_model(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a checkpoint without its weights, on the meta device.

    Args:
        path: Directory of the checkpoint.
        dtype: Of its weights; None is what the config says.

    Raises:
        CheckpointError: The directory is no checkpoint.
        ConfigError: The checkpoint is quantized already.
    """
    config = model_config(path)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"'{path}' is quantized already (its config.json has a quantization_config): give the float checkpoint")
    with torch.device("meta"), reading(path / "config.json", _NO_MODEL):
        return auto_class(config).from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)


def skeleton(path: Path, dtype: str, device: torch.device) -> nn.Module:
    """As `load_model`, without reading a weight: parameters and persistent buffers are on the meta device, in the dtypes they are to have.

    Buffers that no checkpoint holds (rotary tables) are computed, on ``device``. Source: what ``from_pretrained`` of transformers 5 does.

    Args:
        path: Directory of the checkpoint.
        dtype: As of `load_model`.
        device: Where the buffers go.

    Raises:
        CheckpointError, ConfigError: As `load_model` and `meta_model`.
    """
    from transformers import GenerationConfig

    wanted = torch_dtype(dtype) or model_config(path).dtype or _first_dtype(path)
    model: Any = meta_model(path, wanted)
    for name in _kept_wide(model, wanted):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        wide = getattr(module, leaf).detach().to(torch.float32)
        setattr(module, leaf, nn.Parameter(wide, requires_grad=False) if leaf in module._parameters else wide)
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device=device)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # to be read: without this mark, transformers draws random numbers for meta tensors too
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    generation = path / "generation_config.json"
    if generation.is_file():
        read_json(generation)
        with reading(generation, "it is damaged; fetch it again, or remove it"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    found: nn.Module = model.eval()
    return found


def torch_dtype(name: str) -> torch.dtype | None:
    """The torch dtype of that name; None for ``auto``. Raises ConfigError for others."""
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"the dtype {name!r} cannot be used: use auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def torch_device(name: str) -> torch.device:
    """The device of that name. Raises ConfigError where it cannot be used."""
    try:
        target = torch.device(name)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {name!r} cannot be used here: {error}") from error
    return target


def _first_dtype(path: Path) -> torch.dtype:
    """Of the first tensor of floating-point numbers that is stored."""
    stored = (_STORED.get(dtype) for shard in check_shards(path) for dtype, _ in shard.tensors.values())
    return next((dtype for dtype in stored if dtype is not None), torch.float32)


def _kept_wide(model: Any, dtype: torch.dtype) -> list[str]:
    """Tensors that a model of that dtype keeps in float32 nevertheless, as its class says."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(model._get_dtype_plan(dtype))
    expression = build_glob_alternation(patterns)[0] if patterns else None
    return [name for name, t in model.state_dict().items() if expression is not None and t.dtype == dtype and expression.search(name)]


def empty_model(path: Path, attn_implementation: str | None) -> nn.Module:
    """The float model of a checkpoint's config.json with weights that are allocated and not initialised, in the checkpoint's dtype.

    Its buffers that no checkpoint holds (rotary tables) are computed. Raises as `model_config`.
    """
    from transformers.initialization import no_init_weights

    config = model_config(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights(), reading(path / "config.json", _NO_MODEL):
        return (
            auto_class(config)
            .from_config(config, dtype=config.dtype or torch.float32, attn_implementation=attn_implementation, trust_remote_code=False)
            .eval()
        )


def load_model(path: Path, dtype: str = "auto", device: str = "cpu") -> nn.Module:
    """The model of a checkpoint, float or quantized, in evaluation mode.

    Args:
        path: Checkpoint directory.
        dtype: A key of float32, bfloat16, float16; ``auto`` takes what the checkpoint says.
        device: Torch device.

    Raises:
        ConfigError: An unknown dtype or device.
        CheckpointError: A shard is missing, truncated, or lies outside the directory; or weights and config.json do not belong together.
    """
    wanted = torch_dtype(dtype) or "auto"
    config = model_config(path)
    shards = check_shards(path)
    if getattr(config, "quantization_config", None) is None:
        refuse_codes(shards, path)
    target = torch_device(device)
    with reading(path, "weights and config.json do not belong together, or are damaged; fetch the checkpoint again"):
        model, report = auto_class(config).from_pretrained(
            path, dtype=wanted, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        # transformers fills them with random numbers, and warns.
        raise CheckpointError(
            f"'{path}' lacks {len(missing)} tensor(s) of a {type(model).__name__}: {folded(sorted(missing))}. It is incomplete, or its "
            "config.json is of another model"
        )
    found: nn.Module = model.eval().to(target)
    unpack_all(found, path)
    return found


def load_tokenizer(path: Path) -> Any:
    """The tokenizer that lies with a checkpoint, or None where there is none. Raises CheckpointError where it is damaged."""
    from transformers import AutoTokenizer

    files = [path / name for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model") if (path / name).is_file()]
    if not files:
        return None
    for file in files:
        if found := _FAR_ID.search(bounded_bytes(file)):
            raise CheckpointError(f"'{file}' has the token id {int(found[1]):,}, and no vocabulary is so large: fetch it again")
    with reading(
        path, "its tokenizer is damaged, or needs code of its own, which is never run; fetch tokenizer.json and tokenizer_config.json again"
    ):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        tokenizer("some text")  # some settings are looked at only when it is used
    return tokenizer


def read_text(path: Path) -> str:
    """The text of a file, or of all .txt files of a directory in order of name.

    Raises:
        CalibrationError: There is no such file, or no text in it.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise CalibrationError(f"'{path}' is neither a text file nor a directory with .txt files")
    text = "\n\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)
    if not text.strip():
        raise CalibrationError(f"'{path}' holds no text")
    return text


def calibration_tokens(tokenizer: Any, path: Path, count: int, length: int) -> list[Tensor]:
    """Up to ``count`` sequences of ``length`` tokens, each ``[1, length]``, from the start of the text; the last may be shorter.

    Raises:
        CalibrationError: The checkpoint has no tokenizer, or the text gives no token.
    """
    if tokenizer is None:
        raise CalibrationError(
            "the checkpoint has no tokenizer, so text cannot be turned into tokens: use the Python interface with token tensors"
        )
    # Eight characters a token is generous for any tokenizer, so no more text than needed is tokenized.
    text = read_text(path)[: count * length * 8]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0][: count * length]
    if ids.numel() == 0:
        raise CalibrationError(f"'{path}' gives no tokens")
    return [row[None] for row in ids.split(length)]
