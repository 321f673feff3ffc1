"""AMD Quark's script ``python -m quark.scripts.quantize_quark``. It has the same flags, and uses the public
API of this project."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from amd_quark_scripts.arguments import EXPORTERS, argument_parser, check_arguments, exporter_named
from amd_quark_scripts.data_preparation import calibration_data
from amd_quark_scripts.evaluation import eval_model
from amd_quark_scripts.model_preparation import available_device, get_model, get_model_type, get_tokenizer, local_checkpoint
from quark.base.log import shown
from quark.base.version import refuse_rival
from quark.checkpoint import ExportOptions, export_safetensors, import_model_from_safetensors
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.errors import ConfigError, QuarkError, UnsupportedError
from quark.models.hf.skeleton import meta_model
from quark.models.plan.family import template_of
from quark.plugins import schemes
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_amd.algorithm_settings import load_quant_algo_config_from_file
from quark_amd.model_exporter import export_gguf
from quark_amd.parameters import load_params, save_params
from quark_workbench.planning.planned_run import plan
from quark_workbench.template_file import register_template_file

__all__ = ["main", "run", "with_group_size"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script. If it fails with a `QuarkError`, print the error on stderr, and exit with code 2."""
    args = argument_parser().parse_args(arguments)
    try:
        refuse_rival()
        run(args)
    except QuarkError as error:
        print(f"quantize_quark: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)


def run(args: argparse.Namespace) -> None:
    """Quantize a model or load an exported model, export it, and evaluate it, as the flags say.

    Raises:
        QuarkError: A flag is refused before the work begins, or a function of the public API raises an error.
    """
    check_arguments(args)
    for name in ["hf_format"] if args.file2file_quantization else args.model_export or ():
        refuse_used_directory(Path(args.output_dir), exporter_named(name, args))
    if args.template_file is not None:
        register_template_file(args.template_file)
    args.model_dir = str(local_checkpoint(args.model_dir, args.revision))
    if args.file2file_quantization:
        _from_disk(args)
        return
    model = _reloaded(args) if args.model_reload or args.params_load else _quantized(args)
    if args.params_save:
        compressed = args.export_weight_format == "real_quantized"
        save_params(model, get_model_type(model), export_dir=args.save_dir, compressed=compressed, reorder=args.pack_method == "reorder")
    for name in args.model_export or ():
        _export(model, name, args)
    if not args.skip_evaluation:
        args.use_ppl_eval_model = True
        eval_model(args, model, save_metrics_to_csv=args.save_metrics_to_csv, output_dir=args.metrics_output_dir)


def _config(model: nn.Module, args: argparse.Namespace) -> QConfig:
    """Return the configuration for the flags, from the template of the model's family."""
    layers = dict(args.layer_quant_scheme or ())
    layers |= {pattern: with_group_size(args.quant_scheme, _size(size)) for pattern, size in args.group_size_per_layer or ()}
    files = args.quant_algo_config_file or ()
    config = template_of(model).get_config(
        scheme=with_group_size(args.quant_scheme, args.group_size),
        algorithm=args.quant_algo,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale,
        kv_cache_post_rope=True if args.kv_cache_post_rope else None,
        attention_scheme=args.attention_dtype,
        layer_config=layers or None,
        exclude_layers=args.exclude_layers,
        algo_configs={name: load_quant_algo_config_from_file(file) for name, file in files} or None,
    )
    return attrs.evolve(config, keep_prequantized_layers=not args.no_keep_prequantized_layers)


def with_group_size(scheme: str, size: int | None) -> str:
    """Return the name of the variant of ``scheme`` whose groups have ``size`` elements.

    Variants for several group sizes have names of the form ``NAME_SIZE``. If the groups of ``scheme`` already
    have this size, or if ``size`` is None, return the name of ``scheme`` itself.

    Raises:
        ConfigError: There is no variant with this size.
    """
    name = schemes().get(scheme).name
    if size is None:
        return name
    stem = re.sub(r"_\d+$", "", name)
    if stem != name and f"{stem}_{size}" in schemes():
        return f"{stem}_{size}"
    weight = schemes().load_config(name)().weight
    specs = weight if isinstance(weight, Sequence) else [weight]
    if any(spec is not None and spec.group_size == size for spec in specs):
        return name
    raise ConfigError(f"the scheme '{name}' does not exist with groups of {size}: leave --group_size out, or choose one of `quark schemes`")


def _size(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--group_size_per_layer has the group size {text!r}, which is not a number. Give a pattern and a number")
    return int(text)


def _from_disk(args: argparse.Namespace) -> None:
    """Quantize from checkpoint to checkpoint."""
    config = _config(meta_model(Path(args.model_dir)), args)
    quantize_checkpoint(
        args.model_dir,
        args.output_dir,
        config,
        partial(_data, args),
        device=available_device(args.device),
        dtype=args.data_type,
        exporter=args.custom_mode,
        options=attrs.evolve(_options(args), tokenizer=get_tokenizer(args.model_dir)),
    )
    print(f"[INFO] Wrote {args.output_dir}.")


def _options(args: argparse.Namespace) -> ExportOptions:
    return ExportOptions(weight_format=args.export_weight_format, pack_method=args.pack_method)


def _data(args: argparse.Namespace, wanted_by: str) -> list[Any]:
    """Return the calibration data. This function is called only if the configuration needs them."""
    return calibration_data(args.dataset, get_tokenizer(args.model_dir), args.batch_size, args.num_calib_data, args.seq_len)


def _quantized(args: argparse.Namespace) -> nn.Module:
    """Return the quantized model, or the float model if the flags skip quantization."""
    config = None if args.skip_quantization else _config(meta_model(Path(args.model_dir)), args)
    for name in args.model_export or ():
        if config is None:
            break
        planned = plan(args.model_dir, config, exporter=exporter_named(name, args), options=_options(args), probing=False)
        if refusals := [refusal.message for refusal in planned.refusals if refusal.kind == UnsupportedError.__name__]:
            raise UnsupportedError(refusals[0])
    model = _float_model(args)
    if config is None:
        return model
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, partial(_data, args)))


def _float_model(args: argparse.Namespace) -> nn.Module:
    where = (args.model_dir, args.data_type, args.device, args.multi_gpu, args.multi_device)
    model, _ = get_model(*where, attn_implementation=args.model_attn_implementation)
    return model


def _reloaded(args: argparse.Namespace) -> nn.Module:
    """Load an exported model, or a model from files that ``--params_save`` has written."""
    if args.params_load:
        return load_params(_float_model(args), args.json_path, args.safetensors_path)
    directory = args.import_model_dir or args.model_dir
    return import_model_from_safetensors(None, directory, attn_implementation=args.model_attn_implementation, device=args.device)


def _export(model: nn.Module, name: str, args: argparse.Namespace) -> None:
    """Export the model in the layout ``name``, a value of ``--model_export``."""
    if EXPORTERS[name] == "quark":
        export_safetensors(model, args.output_dir, args.custom_mode, args.export_weight_format, args.pack_method)
        get_tokenizer(args.model_dir).save_pretrained(args.output_dir)
    elif name == "gguf":
        export_gguf(model, args.output_dir, get_model_type(model), args.model_dir)
    else:
        export_with(exporter_named(name, args), model, args.output_dir)
    print(f"[INFO] Wrote {args.output_dir} ({name}).")


if __name__ == "__main__":
    main()
