"""ModelQuantizer: the documented class that quantizes a model in memory, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quark.base.finite import buffers_of, refuse_non_finite, state_of
from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.torch_state import own_torch_state
from quark.base.version import refuse_unfit_environment
from quark.checkpoint.model_tensors import is_tied_apart
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
    "Nothing has been changed. The checkpoint is damaged, comes from a diverged training, or has values that the dtype cannot represent "
    "(float16 ends at 65504). Repair the checkpoint, or load it in another dtype"
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ModelQuantizer:
    """Quantizes models with one configuration.

    Args:
        config: The quantization configuration. It is never changed.
        multi_device: An option of AMD Quark. It has no effect in this project. If it is True, a warning says
            how to use several devices. Each layer is quantized on the device of its weight.

    Example:
        >>> from quark.config.templates import LLMTemplate
        >>> from quark.runs import ModelQuantizer
        >>> config = LLMTemplate.get("llama").get_config(scheme="int4_wo_128")
        >>> quantizer = ModelQuantizer(config)           # then: model = quantizer.quantize_model(model)
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        refuse_unfit_environment()
        if not isinstance(config, QConfig):
            raise ConfigError(
                f"ModelQuantizer needs a QConfig, not a {type(config).__name__}. LLMTemplate.get(…).get_config(…) returns a QConfig"
            )
        self.config = config
        self.multi_device = multi_device
        if multi_device:
            get_logger(__name__).warning(several_devices("multi_device"))

    def plan(self, model: nn.Module) -> Any:
        """Return the `QuantPlan` of ``model``. The tensors of ``model`` may be on the meta device.

        If the configuration's quantization mode is not eager mode, the implementation of that mode makes the
        plan. The method raises ConfigError with all errors of the configuration.

        Fused experts that are to be quantized are split into separate layers. The outputs of the model do not
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

        If a transformers model was loaded quantized (FP8, compressed-tensors), it is dequantized first, one
        module at a time. Layers that the configuration does not quantize keep their quantization, unless
        ``keep_prequantized_layers`` is False.

        All checks are made before the model is changed. After a later error, for example in a plugin's
        algorithm, the model is partly quantized. It cannot be used or quantized again then, so load the float
        model again. (`quark.runs.quantize_checkpoint` leaves no partial output when it fails.)

        If the configuration has another quantization mode (``quant_mode``), such as FX graph mode, see the
        documentation of that mode. The returned model may then be another object.

        Args:
            model: Any module. A transformers model of a known family is quantized block by block, and any
                other model as one block. If the model is itself a layer, the plan calls it ``layer``, and the
                quantized layer is returned.
            dataloader: Calibration data (see `quark.calibration.batches.calls`), or a function that returns
                calibration data. The function gets a text that says what needs data. Data are read only if
                something needs them, such as static activation scales.

        Returns: The argument ``model``. Its layers are replaced, and it has the attributes ``quant_config``,
        ``quark_plan`` and ``quark_quantized``.

        Raises:
            ConfigError: The configuration does not fit the model. Or the model is not a module, is compiled,
                or has weights that are not plain floats.
            CalibrationError: Calibration data are needed, for example for static scales, but there are none.
            NonFiniteError: A weight or an activation contains NaN or Inf.
            PluginError: A plugin raised an error or returned an invalid result. The message names the plugin,
                its version, the algorithm and the layer.
            UnsupportedError: No installed distribution implements an algorithm. Or the configuration
                quantizes attention, but the attention modules of the model cannot be replaced.
        """
        refuse_no_model(model)
        if self.config.quant_mode is not QuantizationMode.eager_mode:
            quantize = quant_modes().load_quantize(self.config.quant_mode.name)
            with own_torch_state(), running("quantize", source=type(model).__name__, **settings_told(self.config)):
                return quantize(model, self.config, dataloader)  # type: ignore[return-value]  # a mode may return another module
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if device.type == "meta" and all(p.is_meta for p in model.parameters()):
            raise ConfigError(
                "this model is on the meta device and has no weights to quantize. Load the weights first, or quantize the checkpoint with "
                "quark.runs.quantize_checkpoint, which loads one block at a time"
            )
        whole = as_model(model)
        with own_torch_state(), running("quantize", source=type(model).__name__, **settings_told(self.config)) as events:
            events.phase("plan")
            run, coded = self._planned(whole)
            if isinstance(model, fx.GraphModule) and not run.plan.rows:
                raise ConfigError(
                    "this model is a graph of operators, but eager mode quantizes layers. Set quant_mode=QuantizationMode.fx_graph_mode in "
                    "the configuration, or quantize the model from which the graph was captured"
                )
            run = run.with_data(whole, dataloader, device, events=events)
            refuse_unfit(whole, run.plan.quantized)
            refuse_non_finite(state_of(whole), buffers_of(whole), lambda _: _NOT_FINITE)
            quantize_run(run, whole, InPlaceSink(whole), InMemorySource(coded))
            put_back(whole, model)
        _untie(model)
        return model

    def _planned(self, model: nn.Module) -> tuple[Run, Mapping[str, CodedLayer]]:
        """Dequantize a model if it is quantized, and return its `Run`.

        Also return the codes and scales of the layers that keep their quantization, by name.
        """
        source = QuantizedModel.of(model)
        if source is None:
            return plan_run(model, self.config), {}
        codes_of = source.codes_of
        kept = plan_run(source.twin, self.config, codes_of).plan.kept  # raises an error, if any, before the model is changed
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
        """Read a checkpoint, and write a quantized checkpoint, without calibration data.

        If your settings need data, use `quark.runs.quantize_checkpoint`.

        Args:
            pretrained_model_path: Directory of a float or quantized checkpoint, like ``source`` of
                `quark.runs.quantize_checkpoint`.
            save_path: Directory for the result. It must be empty or not exist.
            keep_excluded_layers_as_original_model_state: Whether excluded layers of a quantized checkpoint
                stay quantized, even if the configuration's ``keep_prequantized_layers`` is False.
            legacy_device_args: The device, if it is given as a positional argument.
            weight_converters: As in `quark.runs.quantize_checkpoint`. If the model has fused experts,
                converters that split fused experts are ignored: the experts are split when they are
                quantized.
            device: Torch device. If it is None, the default is "cuda" if there is a CUDA device, and
                otherwise the CPU. If it is a sequence of devices, the first one is used.
            presharded_weights: An argument of AMD Quark that is not supported. It must be None.
            resume: As in `quark.runs.quantize_checkpoint`.
            restart: As in `quark.runs.quantize_checkpoint`.

        Raises:
            UnsupportedError: ``presharded_weights`` is not None. Or the layout of the export cannot store a
                layer that keeps its quantization.
            CalibrationError: The configuration needs calibration data.
            QuarkError: The other errors are those of `quark.runs.quantize_checkpoint`.
        """
        if presharded_weights is not None:
            raise UnsupportedError("the argument presharded_weights is not supported. Give the checkpoint as one directory, without it")
        if self.config.quant_mode is not QuantizationMode.eager_mode:
            raise UnsupportedError(
                "a checkpoint can be quantized only in eager mode. For another quant_mode, load the model and use quantize_model"
            )
        wanted = device if device is not None else next(iter(legacy_device_args), None)
        several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        if several:
            get_logger().info("Several devices are given. Only the first one is used.")
        first: Any = wanted[0] if several else wanted  # type: ignore[index]
        default = "cuda" if torch.cuda.is_available() else "cpu"
        choices: Any = {"weight_converters": weight_converters, "resume": resume, "restart": restart}
        keeps = keep_excluded_layers_as_original_model_state or self.config.keep_prequantized_layers
        config = attrs.evolve(self.config, keep_prequantized_layers=keeps)
        quantize_checkpoint(pretrained_model_path, save_path, config, device=str(first or default), **choices)

    @staticmethod
    def freeze(model: M, quantize: bool | None = None, runtime_options: object = None) -> M:
        """Set ``requires_grad`` of all parameters to False.

        In AMD Quark, this method rounds the weights. In this project, `quantize_model` has already rounded
        them.

        Args:
            model: A quantized model. It is changed in place.
            quantize: An argument of AMD Quark. It has no effect in this project.
            runtime_options: An argument of AMD Quark. It has no effect in this project.

        Raises:
            ConfigError: The model has not been quantized.
        """
        if not getattr(model, "quark_quantized", False):
            raise ConfigError("freeze needs a model that quantize_model has returned. Quantize this model first")
        return model.requires_grad_(False)


def _untie(model: nn.Module) -> None:
    """Replace the model's configuration by a copy that does not tie the head to the embeddings.

    This is done if the head has got a separate weight. Otherwise, ``tie_weights()`` of transformers would
    replace the rounded weight of the head. The original configuration is not changed, because other models
    may use it.
    """
    tied: Any = getattr(model, "config", None)
    if tied is None or not is_tied_apart(model):
        return
    config = copy(tied)
    config.tie_word_embeddings = False
    for module in model.modules():
        if vars(module).get("config") is tied:
            module.config = config


def several_devices(wish: str) -> str:
    """Return a message that says how to use several devices.

    Args:
        wish: Name of the option of AMD Quark that the user has set.
    """
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count < 2:
        return f"{wish} has no effect: this machine has {'one accelerator' if count else 'no accelerator'}, and one device is used."
    return (
        f"{wish} has no effect: only one of {count} devices is used. To use all devices, with one block in the memory of each, quantize "
        f"from disk: torchrun --nproc-per-node {count} -m quark quantize MODEL OUT --device cuda --scheme …"
    )


def refuse_no_model(model: object) -> None:
    """Check that a model is a ``torch.nn.Module`` that runs its own Python code.

    Compiled modules cannot be quantized: calibration cannot pause forward passes inside compiled code, and
    compiled code would continue to use the float layers.

    Raises:
        ConfigError: The object is not a module. Or the module or one of its submodules is compiled, has a
            PEFT adapter, or wraps a model for several devices.
    """
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"the string {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise ConfigError(
            f"a model must be a torch.nn.Module, not {what}. Load the model first, or give its directory to quark.runs.quantize_checkpoint"
        )
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise ConfigError(
                f"this model has a PEFT adapter ({name or type(module).__name__}), which would stay beside the rounded weights. Merge the "
                "adapter into the weights with model = model.merge_and_unload(), and quantize the result"
            )
        if isinstance(module, _WRAPPERS) or type(module).__name__ in _SHARDED:
            raise ConfigError(
                f"{name or 'this model'} is a {type(module).__name__}, which renames its layers. Quantize its attribute `module`, and wrap "
                "the result"
            )
        if _is_compiled(module):
            what = f"'{name}' is" if name else "this model is"
            raise ConfigError(
                f"{what} compiled with torch.compile. Quantize the original module (model._orig_mod; or load the model again if you called "
                "model.compile()), and then compile the result"
            )


def refuse_unfit(model: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Check the parameters of every layer that will be quantized. Different layers may have different dtypes.

    Raises:
        ConfigError: A parameter is not loaded, or is not a dense floating-point tensor of 16 bits or more. Or
            the parameters of one layer have different dtypes.
    """
    layers_of: dict[str, list[str]] = {}
    for row in rows:
        for error in _errors(model.get_submodule(row.name)):
            layers_of.setdefault(error, []).append(row.name)
    if layers_of:
        errors = "; ".join(f"{len(names)} layer(s) ({folded(names)}) have {error}" for error, names in layers_of.items())
        raise ConfigError(f"this {type(model).__name__} cannot be quantized: {errors}. Nothing has been changed")


def _errors(layer: nn.Module) -> Iterator[str]:
    parameters: dict[str, Any] = dict(layer.named_parameters(recurse=False))
    if "forward" in vars(layer):
        yield (
            "a forward that was set on the object and would go on with the float weight (if hooks of accelerate have set it because of a "
            "device_map, load the model on one device, or use quark.runs.quantize_checkpoint; otherwise remove it)"
        )
    if "weight" in vars(layer):
        yield (
            "a weight that is no parameter, because a hook computes it before each forward pass (make it a parameter, for example with "
            "torch.nn.utils.remove_weight_norm or torch.nn.utils.prune.remove)"
        )
    for name, parameter in parameters.items():
        if is_traceable_wrapper_subclass(parameter):
            yield f"a {name} of the class {type(parameter).__name__}, which has no values of its own (load it as an ordinary tensor)"
        elif parameter.is_inference():
            yield f"a {name} that was created in torch.inference_mode() and cannot be changed (load the model outside this mode)"
        elif parameter.is_meta:
            yield f"a {name} on the meta device, without values (load the model, or use quark.runs.quantize_checkpoint)"
        elif parameter.layout is not torch.strided:
            yield f"a sparse {name} of {parameter.layout} (make it dense with to_dense())"
        elif parameter.dtype not in _FLOATS:
            yield f"a {name} of {_short(parameter)}, which is already quantized or cannot be rounded (use the float model, or exclude them)"
    dtypes = {_short(p) for p in parameters.values()}
    if len(dtypes) > 1 and all(p.dtype in _FLOATS for p in parameters.values()):
        yield f"parameters of different dtypes, {', '.join(sorted(dtypes))} (convert them to one dtype)"


_WRAPPERS, _SHARDED = (nn.DataParallel, nn.parallel.DistributedDataParallel), {"FullyShardedDataParallel"}
"""Classes that wrap a model for several devices, and names of such classes that are slow to import."""


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) wraps the module in a class of dynamo, and dynamo may not be imported yet.
    # module.compile() sets an attribute.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
