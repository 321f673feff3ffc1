"""Checks, before any change, that a model can be quantized in memory: it is an uncompiled module with plain floating-point weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.names import folded
from quark.planning.plan_row import PlanRow

__all__ = ["refuse_no_model", "refuse_unfit"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_no_model(model: object) -> None:
    """Check that a model is a ``torch.nn.Module`` that runs its own Python code.

    Raises:
        ConfigError: The object is no module; or the module, or a submodule, is compiled. Calibration pauses forwards inside a model, which
            compiled code does not allow, and compiled code would keep the graph of the float layers.
    """
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"the string {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise ConfigError(
            f"a model is a torch.nn.Module, not {what}: load it first, or give its directory to quark.runs.quantize_checkpoint"
        )
    for name, module in model.named_modules():
        if _is_compiled(module):
            what = f"'{name}' is" if name else "this model is"
            raise ConfigError(
                f"{what} compiled (torch.compile): quantize the original module, its _orig_mod, or a model whose compile() was not "
                "called, and compile the result"
            )


def refuse_unfit(model: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Check the parameters of every layer that will be quantized; layers may differ in their dtypes.

    Raises:
        ConfigError: A parameter is not loaded, or no dense floating-point tensor of 16 bits or more, or a layer's parameters differ in
            dtype.
    """
    layers_of: dict[str, list[str]] = {}
    for row in rows:
        for error in _errors(model.get_submodule(row.name)):
            layers_of.setdefault(error, []).append(row.name)
    if layers_of:
        errors = "; ".join(f"{len(names)} layer(s) ({folded(names)}) have {error}" for error, names in layers_of.items())
        raise ConfigError(f"this {type(model).__name__} cannot be quantized: {errors}. Nothing has been changed")


def _errors(layer: nn.Module) -> Iterator[str]:
    parameters = dict(layer.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        if parameter.is_meta:
            yield f"a {name} on the meta device, without values: load it, or use quark.runs.quantize_checkpoint"
        elif parameter.layout is not torch.strided:
            yield f"a sparse {name} ({parameter.layout}): make it dense, with to_dense()"
        elif parameter.dtype not in _FLOATS:
            yield f"a {name} of {_short(parameter)}, which is quantized already or no number to round: use the float model, or exclude them"
    dtypes = {_short(p) for p in parameters.values()}
    if len(dtypes) > 1 and all(p.dtype in _FLOATS for p in parameters.values()):
        yield f"a weight and a bias of different dtypes ({', '.join(sorted(dtypes))}), with which they cannot run: convert one of them"


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) wraps the module in a class of dynamo, which need not be imported; module.compile() sets an attribute.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
