"""The candidates of a selection: schemes, and the number of bytes that a layer needs in each scheme."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs
import torch

from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.templates.schemes import scheme_config, scheme_record
from quark.errors import ConfigError
from quark.models.layers.coded_layer import packed_meta
from quark.numbers import quantizer_for

__all__ = ["FLOAT", "Candidate", "candidates_of"]

FLOAT = "float"
"""Name of the candidate that keeps a layer in float."""
_FLOAT_NAMES = (FLOAT, "bf16", "bfloat16", "fp16", "float16", "none")
_ORDER = "reorder"  # an order of 4-bit codes in a word; all orders take the same bytes


@attrs.frozen(eq=False)
class Candidate:
    """One of the choices for a layer: a scheme, or no quantization.

    Attributes:
        name: Name of the scheme, or `FLOAT` for no quantization.
        config: Layer configuration of the scheme. For `FLOAT`, it quantizes nothing.
        clients: Names of the programs that can load the scheme, according to the scheme's record. For
            `FLOAT`, which every program can load, this is empty.
    """

    name: str
    config: QLayerConfig
    clients: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether the candidate keeps layers in float."""
        return self.name == FLOAT

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        """Return why a layer with a weight of this ``shape`` cannot have the scheme, or None if it can."""
        slots = ((self.config.weight, shape, False), (self.config.input_tensors, (1, *shape[1:2]), True))
        errors = (quantizer_for(spec, activation=is_input).shape_error(of) for spec, of, is_input in slots if spec is not None)
        return next((error for error in errors if error is not None), None)

    def stored_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the number of bytes that a layer needs in a checkpoint: weights, scales and input scales.

        Args:
            shape: Shape of the weight, ``[out, in]``.
            dtype: Dtype of the float weight.
        """
        if self.config.weight is None:
            return prod(shape) * dtype.itemsize
        packed = packed_meta(quantizer_for(self.config.weight, activation=False), shape, _ORDER)
        return sum(t.nbytes for t in packed.values()) + _input_bytes(self.config.input_tensors, shape)


def _input_bytes(spec: TensorSpec | None, shape: tuple[int, ...]) -> int:
    """Return the number of bytes that a layer's static input scales need in a checkpoint."""
    if spec is None:
        return 0
    quantizer = quantizer_for(spec, activation=True)
    if quantizer.is_dynamic or quantizer.is_float:
        return 0
    qparams = quantizer.empty_qparams((1, *shape[1:2]), "meta")
    return sum(t.nbytes for t in quantizer.pack_qparams(qparams, order=_ORDER).values())


def candidates_of(names: Sequence[str], runtime: str | None = None) -> dict[str, Candidate]:
    """Return a dictionary from name to candidate, in the order of ``names``.

    Args:
        names: Names of registered schemes. ``float``, or a dtype such as ``bf16``, keeps a layer in float.
        runtime: Name of a program that must be able to load all schemes, such as ``"vLLM"``. The records of
            schemes name such programs as ``clients``. None allows all schemes.

    Raises:
        ConfigError: There are fewer than two candidates, a scheme quantizes no weights, or the runtime cannot
            load a scheme.
        UnknownNameError: There is no such scheme.
    """
    found: dict[str, Candidate] = {}
    for name in names:
        candidate = _candidate(name)
        if candidate.name in found:
            raise ConfigError(f"the candidate '{name}' is named twice: name it once")
        if runtime is not None and not candidate.is_float and not _loads(runtime, candidate.clients):
            raise ConfigError(
                f"'{runtime}' does not load the scheme '{name}'; runtimes that load it: {', '.join(candidate.clients) or 'none'}. Leave "
                f"the scheme out, or choose another runtime"
            )
        found[candidate.name] = candidate
    if len(found) < 2 or all(candidate.is_float for candidate in found.values()):
        raise ConfigError(
            f"a selection needs two candidates or more, but the given ones are {', '.join(found) or 'none'}: name another scheme"
        )
    return found


def _candidate(name: str) -> Candidate:
    if name.lower() in _FLOAT_NAMES:
        return Candidate(FLOAT, QLayerConfig())
    config = scheme_config(name)
    if config.weight is None:
        raise ConfigError(f"the scheme '{name}' quantizes no weights, so it saves nothing: leave out this scheme")
    return Candidate(name, config, scheme_record(name).clients)


def _loads(runtime: str, clients: Sequence[str]) -> bool:
    """Return whether a runtime is one of ``clients``. ``vLLM`` also matches ``vLLM (CPU, CUDA, ROCm)``."""
    wanted = runtime.lower()
    return any(client.lower() == wanted or client.lower().startswith(f"{wanted} (") for client in clients)
