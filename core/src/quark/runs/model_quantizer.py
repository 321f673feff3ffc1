"""ModelQuantizer, the documented entry point: quantize a model in memory, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, fx, nn

from quark.base.finite import buffers_of, refuse_non_finite, state_of
from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.torch_state import own_torch_state
from quark.base.version import refuse_unfit_environment
from quark.config.enums import QuantizationMode
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.models.hf.quantized_source import QuantizedModel
from quark.models.layers.coded_layer import CodedLayer
from quark.models.plan.one_layer import as_model, put_back
from quark.models.plan.plan_row import PlanRow
from quark.plugins import quant_modes
from quark.plugins.run_events import running
from quark.runs.from_disk import quantize_checkpoint
from quark.runs.quantize_block import quantize_run
from quark.runs.run import Data, Run, plan_run
from quark.runs.selected_algorithms import settings_told
from quark.runs.sink import InPlaceSink
from quark.runs.source import InMemorySource

M = TypeVar("M", bound=nn.Module)

_NOT_FINITE = (
    "Nothing has been changed. The checkpoint is damaged or comes from a diverged run, or its values were cast to a dtype that cannot hold "
    "them, such as float16 beyond 65504: repair it, or load it in another dtype"
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ModelQuantizer:
    """Quantizes models with one configuration.

    Args:
        config: The quantization configuration; it is never changed.
        multi_device: Accepted with a warning that says how several devices are used. Each layer is quantized
            on its own device.

    Example:
        >>> from quark.config.templates import LLMTemplate
        >>> from quark.runs import ModelQuantizer
        >>> config = LLMTemplate.get("llama").get_config(scheme="int4_wo_128")
        >>> quantizer = ModelQuantizer(config)           # then: model = quantizer.quantize_model(model)
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        refuse_unfit_environment()
        if not isinstance(config, QConfig):
            raise ConfigError(f"ModelQuantizer needs a QConfig, not a {type(config).__name__}: see LLMTemplate.get(…).get_config(…)")
        self.config = config
        self.multi_device = multi_device
        if multi_device:
            get_logger(__name__).warning(several_devices("multi_device"))

    def plan(self, model: nn.Module) -> Any:
        """Return the `QuantPlan` of ``model``, or the plan of its quantization mode; meta tensors suffice.

        Raises ConfigError with all problems.

        Fused experts that are to be quantized are split into separate layers; the model's outputs do not
        change.
        """
        refuse_no_model(model)
        if self.config.quant_mode is not QuantizationMode.eager_mode:
            return quant_modes().load_plan(self.config.quant_mode.name)(model, self.config)
        source = QuantizedModel.of(model)
        if source is not None:
            return plan_run(source.twin, self.config, source.codes_of).plan
        return plan_run(as_model(model), self.config).plan

    def quantize_model(self, model: M, dataloader: Data = None) -> M:
        """Quantize ``model`` in place, block by block, and return it.

        A transformers model that was loaded quantized (FP8, compressed-tensors) is dequantized first, one
        module at a time. Its layers that are not to be quantized keep their quantization, unless
        ``keep_prequantized_layers`` is False.

        Checks come before changes. A later error, such as in a plugin's algorithm, leaves the model partly
        quantized: it cannot be used or quantized again, so load the float model again.
        (`quark.runs.quantize_checkpoint` leaves no partial output when it fails.)

        In another quantization mode (``quant_mode``), such as FX graph mode, the documentation of that mode
        applies. The returned model may be another object.

        Args:
            model: Any module tree. A transformers model of a known family is quantized block by block,
                another model as one block. If the model is itself a layer, the plan calls it ``layer``, and
                the quantized layer is returned.
            dataloader: Calibration data (see `quark.calibration.batches.calls`), or a function that returns
                them; its argument says what needs data. Read only if something needs data, such as static
                activation scales.

        Returns:
            The same object, its layers replaced, with the attributes ``quant_config``, ``quark_plan`` and
            ``quark_quantized``.

        Raises:
            ConfigError: The configuration does not fit the model. Or the model is not a module, is compiled,
                or has weights that are not plain floats.
            CalibrationError: Static scales need calibration data, and there are none.
            NonFiniteError: A weight or an activation holds NaN or Inf.
            PluginError: A plugin raised an error or returned an invalid result. The message names the plugin,
                its version, the algorithm and the layer.
            UnsupportedError: No installed distribution implements an algorithm; or attention is to be
                quantized, but the model's attention cannot be replaced.
        """
        refuse_no_model(model)
        if self.config.quant_mode is not QuantizationMode.eager_mode:
            quantize = quant_modes().load_quantize(self.config.quant_mode.name)
            with own_torch_state(), running("quantize", source=type(model).__name__, **settings_told(self.config)):
                return quantize(model, self.config, dataloader)  # type: ignore[return-value]  # a mode may return another module
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if device.type == "meta" and all(p.is_meta for p in model.parameters()):
            raise ConfigError(
                "this model is on the meta device and has no weights to quantize: load them first, or quantize the checkpoint itself with "
                "quark.runs.quantize_checkpoint, which has one block in memory at a time"
            )
        whole = as_model(model)
        with own_torch_state(), running("quantize", source=type(model).__name__, **settings_told(self.config)) as events:
            events.phase("plan")
            run, coded = self._planned(whole)
            if isinstance(model, fx.GraphModule) and not run.plan.rows:
                raise ConfigError(
                    "this graph has operators, but eager mode quantizes layers: set quant_mode=QuantizationMode.fx_graph_mode in "
                    "the configuration, or quantize the model that was captured"
                )
            run = run.with_data(whole, dataloader, device, events=events)
            refuse_unfit(whole, run.plan.quantized)
            refuse_non_finite(state_of(whole), buffers_of(whole), lambda _: _NOT_FINITE)
            quantize_run(run, whole, InPlaceSink(whole), InMemorySource(coded))
            put_back(whole, model)
        return model

    def _planned(self, model: nn.Module) -> tuple[Run, Mapping[str, CodedLayer]]:
        """Make a model float, and return its run and the codes of the layers that keep their quantization."""
        source = QuantizedModel.of(model)
        if source is None:
            return plan_run(model, self.config), {}
        codes_of = source.codes_of
        kept = plan_run(source.twin, self.config, codes_of).plan.kept  # refuses what does not fit before anything is changed
        coded = source.coded(kept)
        source.dequantize()
        return plan_run(model, self.config, codes_of), coded

    def direct_quantize_checkpoint(
        self,
        pretrained_model_path: str | Path,
        save_path: str | Path,
        keep_excluded_layers_as_original_model_state: bool = False,
        *legacy_device_args: str | torch.device,
        weight_converters: Sequence[Any] | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        presharded_weights: dict[str, int] | None = None,
        resume: bool = False,
        restart: bool = False,
    ) -> None:
        """Quantize a checkpoint to a checkpoint, without calibration data.

        If your settings need data, use `quark.runs.quantize_checkpoint`.

        Args:
            pretrained_model_path: Directory of a checkpoint, float or quantized, as in
                `quark.runs.quantize_checkpoint`.
            save_path: Directory to write; it must not exist or must be empty.
            keep_excluded_layers_as_original_model_state: Excluded layers of a quantized checkpoint stay
                quantized, even if the configuration's ``keep_prequantized_layers`` is False.
            legacy_device_args: ``device`` as a positional argument.
            weight_converters: As in `quark.runs.quantize_checkpoint`. Converters that split fused experts are
                ignored if the model has fused experts, which are split when they are quantized.
            device: Torch device. None means "cuda", or the CPU if there is no CUDA device. Of several
                devices, the first is used.
            presharded_weights: Documented by AMD Quark; not supported.
            resume: As in `quark.runs.quantize_checkpoint`.
            restart: As in `quark.runs.quantize_checkpoint`.

        Raises:
            UnsupportedError: ``presharded_weights`` are given; or the layout cannot hold a layer that keeps
                its quantization.
            CalibrationError: The configuration needs calibration data.
            QuarkError: As in `quark.runs.quantize_checkpoint`.
        """
        if presharded_weights is not None:
            raise UnsupportedError("presharded_weights cannot be read: give the checkpoint as one directory, without them")
        if self.config.quant_mode is not QuantizationMode.eager_mode:
            raise UnsupportedError(
                "a checkpoint is quantized layer by layer, in eager mode: for another mode load the model and use quantize_model"
            )
        wanted = device if device is not None else next(iter(legacy_device_args), None)
        several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        if several:
            get_logger().info("Of several devices the first is used.")
        first: Any = wanted[0] if several else wanted  # type: ignore[index]
        default = "cuda" if torch.cuda.is_available() else "cpu"
        choices: Any = {"weight_converters": weight_converters, "resume": resume, "restart": restart}
        keeps = keep_excluded_layers_as_original_model_state or self.config.keep_prequantized_layers
        config = attrs.evolve(self.config, keep_prequantized_layers=keeps)
        quantize_checkpoint(pretrained_model_path, save_path, config, device=str(first or default), **choices)

    @staticmethod
    def freeze(model: M, quantize: bool | None = None, runtime_options: object = None) -> M:
        """Set ``requires_grad`` to False; AMD Quark rounds weights in this step before an export.

        Here, `quantize_model` has already rounded them.

        Args:
            model: A quantized model, changed in place.
            quantize: Documented by AMD Quark; no effect.
            runtime_options: Documented by AMD Quark; no effect.

        Raises:
            ConfigError: The model has not been quantized.
        """
        if not getattr(model, "quark_quantized", False):
            raise ConfigError("freeze needs a model that quantize_model has returned: quantize this one first")
        return model.requires_grad_(False)


def several_devices(wish: str) -> str:
    """Return a sentence about AMD Quark's option that spreads a model over devices."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count < 2:
        return f"{wish} changes nothing: this machine has {'one accelerator' if count else 'no accelerator'}, and one device is used."
    return (
        f"{wish}: the model is on one of {count} devices. To use all of them, with one block in the memory of each, quantize from disk: "
        f"torchrun --nproc-per-node {count} -m quark quantize MODEL OUT --device cuda --scheme …"
    )


def refuse_no_model(model: object) -> None:
    """Check that a model is a ``torch.nn.Module`` that runs its own Python code.

    Raises:
        ConfigError: The object is not a module; or the module or a submodule is compiled, or has a PEFT
            adapter. Calibration cannot pause forward passes inside compiled code, and compiled code would
            keep the graph of the float layers.
    """
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"the string {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise ConfigError(
            f"a model is a torch.nn.Module, not {what}: load it first, or give its directory to quark.runs.quantize_checkpoint"
        )
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise ConfigError(
                f"this model has an adapter of PEFT ({name or type(module).__name__}), which would stay beside the rounded weights: merge "
                "it into them with model = model.merge_and_unload(), and quantize the result"
            )
        if _is_compiled(module):
            what = f"'{name}' is" if name else "this model is"
            raise ConfigError(
                f"{what} compiled (torch.compile): quantize the original module, its _orig_mod, or a model whose compile() was not "
                "called, and compile the result"
            )


def refuse_unfit(model: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Check the parameters of every layer that will be quantized; layers may differ in their dtypes.

    Raises:
        ConfigError: A parameter is not loaded, or is not a dense floating-point tensor of 16 bits or more; or
            a layer's parameters differ in dtype.
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
        if parameter.is_inference():
            yield f"a {name} made in torch.inference_mode(), which cannot be changed: load the model outside of it"
        elif parameter.is_meta:
            yield f"a {name} on the meta device, without values: load it, or use quark.runs.quantize_checkpoint"
        elif parameter.layout is not torch.strided:
            yield f"a sparse {name} ({parameter.layout}): make it dense, with to_dense()"
        elif parameter.dtype not in _FLOATS:
            yield f"a {name} of {_short(parameter)}, which is already quantized or cannot be rounded: use the float model, or exclude them"
    dtypes = {_short(p) for p in parameters.values()}
    if len(dtypes) > 1 and all(p.dtype in _FLOATS for p in parameters.values()):
        yield f"a weight and a bias of different dtypes ({', '.join(sorted(dtypes))}), with which they cannot run: convert one of them"


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) wraps the module in a class of dynamo, which may not be imported yet;
    # module.compile() sets an attribute.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
