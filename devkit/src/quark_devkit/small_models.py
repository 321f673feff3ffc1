"""A small language model with random weights, tokens for the model, and configurations that quantize it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig, levels
from quark.config.model import QConfig
from quark.config.templates import LLMTemplate
from quark.errors import QuarkError
from quark.numbers import quantizer_for
from quark.plugins import formats, schemes, templates
from quark.runs import ModelQuantizer
from quark_devkit.check import assume

__all__ = [
    "BLOCKS",
    "InFloat64",
    "batches",
    "coarse_scheme",
    "fitting",
    "fitting_schemes",
    "logits",
    "quantized",
    "run_config",
    "run_config_of",
    "saved",
    "scheme_with_inputs",
    "small_family",
    "small_model",
    "with_cache",
]

NOISE = 3
"""Checks use weights of more bits than this. At 2 bits, the error of a small model is so large that it hides
harm."""
VOCABULARY, HIDDEN, INTERMEDIATE, BLOCKS, HEADS, KV_HEADS = 96, 64, 128, 2, 4, 2
_SHAPES = ((HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE))
"""Shapes of the small model's layers, which a scheme must fit."""
OUTLIERS = (3, 17, 40)
"""Channels of the residual stream that norms make large, as in trained models, for equalization."""


def small_model(dtype: torch.dtype = torch.float32, *, is_fused: bool = False) -> nn.Module:
    """Return a model of two decoder blocks. It has grouped queries, and a few channels with large
    activations.

    The layers have biases, and the embeddings are tied to the head. The fused variant has fused q/k/v and
    gate/up projections without biases, and a separate head.

    Args:
        dtype: Dtype of the parameters.
        is_fused: Whether to return the fused variant.

    Raises:
        NotApplicableError: No installed template describes the model's family.
    """
    small_family(is_fused=is_fused)
    return copy.deepcopy(_small_model(dtype, is_fused))


@lru_cache(maxsize=8)
def _small_model(dtype: torch.dtype, is_fused: bool) -> nn.Module:
    config, kind = _small_config(is_fused)
    with torch.random.fork_rng(devices=[]):
        whole: Any = kind(config).eval().requires_grad_(False)
    generator, of_biases = torch.Generator().manual_seed(0), torch.Generator().manual_seed(5)
    for name, parameter in whole.named_parameters():
        if name.endswith(".bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=of_biases) * 0.1)
        elif parameter.ndim == 1:
            parameter.copy_(0.6 + 0.8 * torch.rand(parameter.shape, generator=generator))
            parameter[list(OUTLIERS)] *= 12
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7 / parameter.shape[1] ** 0.5)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)  # not buffers: rotary embeddings have float32 buffers in every loaded model
    return whole


def _small_config(is_fused: bool) -> tuple[Any, Any]:
    """Return the configuration and the class of the small model, or of its fused variant."""
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

    config: Any = Phi3Config if is_fused else LlamaConfig
    with_biases = {} if is_fused else {"attention_bias": True, "mlp_bias": True}
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config(**sizes, **with_biases, tie_word_embeddings=not is_fused), Phi3ForCausalLM if is_fused else LlamaForCausalLM


def batches(count: int = 4, length: int = 48, seed: int = 0) -> list[Tensor]:
    """Return sequences of tokens, each of shape ``[1, length]``. The same seed gives the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1, length), generator=generator) for _ in range(count)]


def saved(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the small model as a checkpoint in Hugging Face form, and return the directory."""
    model: Any = small_model(dtype)
    model.save_pretrained(directory)
    return directory


def small_tokenizer() -> Any:
    """Return a byte-level tokenizer without merges, with as many tokens as the small model has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def coarse_scheme() -> str:
    """Return the name of the weight-only scheme with the fewest bits above `NOISE` that fits the small model.

    Raises:
        NotApplicableError: There is no such scheme.
    """
    return _coarsest(_SHAPES, "a model with 64 channels")


def scheme_with_inputs() -> str | None:
    """Return the name of a fitting scheme with static input scales; None if there is no such scheme."""
    of_one_level = {name: config for name, config in fitting(_SHAPES).items() if len(levels(config.weight)) == 1}
    found = ((name, levels(config.input_tensors)) for name, config in of_one_level.items())
    return next((name for name, specs in found if len(specs) == 1 and specs[0].is_dynamic is False), None)


def fitting_schemes() -> list[str]:
    """Return one scheme that fits the small model for each combination of number format, granularity and
    scale format of weights.

    Schemes with float inputs come first. Among these and among the others, schemes with fewer bits come
    first.
    """
    found: dict[object, tuple[bool, float, str]] = {}
    for name, config in fitting(_SHAPES).items():
        kind = tuple((s.dtype, s.qscheme, s.symmetric, s.scale_format, s.is_scale_quant) for s in levels(config.weight))
        candidate = (config.input_tensors is not None, _bits(config), name)
        found[kind] = min(found.get(kind, candidate), candidate)
    return [name for *_, name in sorted(found.values())]


def run_config_of(facts: Architecture) -> QConfig:
    """Return a configuration in the coarsest weight-only scheme that fits 32 input channels.

    All layers are quantized, except the layers that the family excludes.

    Raises:
        NotApplicableError: There is no such scheme.
    """
    name = _coarsest((*_SHAPES, (8, 32)), "layers with 32 input channels")
    return QConfig(global_quant_config=schemes().load_config(name)(), exclude=facts.with_modules(facts.exclude_layers_name))


def small_family(*, is_fused: bool = False) -> Architecture:
    """Return the facts about the family of the small model, or of its fused variant.

    Raises:
        NotApplicableError: No installed template describes the family.
    """
    family = "phi3" if is_fused else "llama"
    assume(family in templates(), "no installed template knows the family of the small model: install quark-templates")
    return templates().load_architecture(family)


def run_config(scheme: str | QLayerConfig, *algorithms: AlgoConfig, exclude: tuple[str, ...] = ()) -> QConfig:
    """Return the configuration of a run that quantizes the small model, except its head, in one scheme."""
    layer = schemes().load_config(scheme)() if isinstance(scheme, str) else scheme
    head = small_family().exclude_layers_name
    return QConfig(global_quant_config=layer, exclude=[*head, *exclude], algo_config=list(algorithms) or None)


def with_cache(config: QConfig) -> QConfig:
    """Return a configuration that also quantizes keys and values, if a registered scheme can quantize the
    cache."""
    name = next((record.name for record in schemes() if record.kv_cache is not None), None)
    if name is None:
        return config
    cached = LLMTemplate.get(small_family().model_type).get_config(name, kv_cache_scheme=name)
    cache: dict[str, Any] = {"kv_cache_quant_config": cached.kv_cache_quant_config, "kv_cache_group": cached.kv_cache_group}
    return attrs.evolve(config, **cache, kv_cache_post_rope=True)


def quantized(config: QConfig, dtype: torch.dtype = torch.float32, data: list[Tensor] | None = None, *, is_fused: bool = False) -> Any:
    """Return the small model, or its fused variant, quantized."""
    return ModelQuantizer(config).quantize_model(small_model(dtype, is_fused=is_fused), batches() if data is None else data)


@torch.no_grad()
def logits(model: nn.Module, data: list[Tensor] | None = None) -> Tensor:
    """Return the model's logits, with shape ``[tokens, vocabulary]``. By default, the tokens are not those of
    calibration."""
    return torch.cat([model(x).logits[0] for x in (batches(4, seed=1) if data is None else data)])


def _bits(config: QLayerConfig) -> float:
    return formats().get(levels(config.weight)[-1].dtype.name).bits


def has_vectors(config: QLayerConfig) -> bool:
    """Return whether elements of a weight are rounded together, as vectors. Tunings and some roundings cannot
    do this."""
    return config.weight is not None and quantizer_for(config.weight, activation=False).stored_level.format.vector > 1


def _coarsest(shapes: Iterable[tuple[int, int]], wanted: str) -> str:
    """Return the weight-only scheme with the fewest bits above `NOISE`.

    If no scheme has more bits than that, return the one with the fewest bits.

    Schemes that round vectors, or that have several levels, are left out.
    """
    of_weights = {name: config for name, config in fitting(shapes).items() if config.input_tensors is None}
    found = [(_bits(config), name) for name, config in of_weights.items() if len(levels(config.weight)) == 1 and not has_vectors(config)]
    found = [one for one in found if one[0] > NOISE] or found
    assume(found, f"no registered scheme quantizes only weights and fits {wanted}")
    return min(found)[1]


def fitting(shapes: Iterable[tuple[int, int]]) -> dict[str, QLayerConfig]:
    """Return the schemes whose weights fit these shapes, by name."""
    found = {}
    for name in schemes().names():
        try:
            config = schemes().load_config(name)()
            if config.weight is not None:
                quantizer = quantizer_for(config.weight, activation=False)
                if all(quantizer.shape_error(shape) is None for shape in shapes):
                    found[name] = config
        except (QuarkError, ValueError, TypeError):  # other checks find broken schemes
            continue
    return found


class InFloat64(TorchFunctionMode):
    """A context in which norms, softmax and routers also compute in float64."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        function: Callable[..., Any] = Tensor.double if func is Tensor.float else func
        return function(*args, **named)
