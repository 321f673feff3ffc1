"""The flags of AMD Quark's script ``quantize_quark.py``: names, defaults, choices, and refused flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quark.base.log import get_logger
from quark.config.templates.algorithms import canonical_algorithm
from quark.errors import ConfigError, UnsupportedError
from quark.plugins import algorithms, exporters
from quark.runs.selected_algorithms import in_order
from quark_workbench.data.extras import extra

__all__ = ["EXPORTERS", "argument_parser", "check_arguments", "exporter_named"]

_IN_VLLM = "evaluate the exported checkpoint with quark evaluate --backend vllm"
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "use_tp": (bool, _IN_VLLM),
        "use_mlperf_rouge": (bool, "use --tasks"),
        "evaluation_dataset": (lambda name: name != "wikitext", "use wikitext, or quark evaluate --text with your text"),
    }
)
"""Refused flags: the refused values, and what to use instead."""
_IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "enable_native_inference": f"the model is evaluated as it is; {_IN_VLLM}",
        "gpu_resident_blocks": "quark quantizes one block at a time in any case",
        "torch_compile": "the model is evaluated without torch.compile, whose result is the same",
    }
)
"""Ignored flags, and what quark does instead."""
EXPORTERS: Mapping[str, str] = MappingProxyType(
    {"hf_format": "quark", "quark_format": "quark", "quark_safetensors": "quark", "onnx": "onnx", "gguf": "gguf"}
)
"""Values of ``--model_export`` and names of exporters."""


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the script's flags."""
    parser = argparse.ArgumentParser(prog="python -m quark.scripts.quantize_quark", description="Quantize, export and evaluate a model.")
    for add in (_add_model, _add_data, _add_quantization, _add_export, _add_evaluation):
        add(parser)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Check the flags before the script begins to work.

    ``--quant_flow file2file`` sets ``args.file2file_quantization``.

    Raises:
        UnsupportedError: A flag is not supported. The message says what to use instead.
        ConfigError: A flag is missing, a value is invalid, or algorithms exclude each other.
        UnknownNameError: An algorithm is unknown.
        MissingPluginError: A package that the evaluation needs is not installed.
    """
    for name, (is_refused, instead) in _REFUSED.items():
        if is_refused(value := getattr(args, name)):
            given = "" if value is True else f" {value}"
            raise UnsupportedError(f"--{name}{given} is not supported: {instead}")
    for name, what in _IGNORED.items():
        if getattr(args, name):
            get_logger(__name__).warning(f"--{name} is ignored: {what}.")
    for name in args.model_export or ():
        if EXPORTERS[name] not in exporters():
            raise UnsupportedError(f"--model_export {name} needs the exporter '{EXPORTERS[name]}': install a plugin that has it")
    names = [exporter_named(name, args) for name in args.model_export or ()]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"--model_export names the exporter '{twice[0]}' twice, and both would write the same files: name it once")
    if args.custom_mode not in exporters():
        raise UnsupportedError(f"--custom_mode {args.custom_mode} needs an exporter of that name. Install a plugin that provides it")
    if args.params_load and not (args.json_path and args.safetensors_path):
        raise ConfigError("--params_load reads two files: give --json_path and --safetensors_path")
    if args.quant_scheme is None and not (args.skip_quantization or args.model_reload or args.params_load):
        raise ConfigError("--quant_scheme is missing: give one that `quark schemes` lists, or give --skip_quantization")
    if args.quant_flow not in (None, "file2file") and args.file2file_quantization:
        raise ConfigError(f"--file2file_quantization contradicts --quant_flow {args.quant_flow}: leave one of them out")
    args.file2file_quantization |= args.quant_flow == "file2file"
    if args.file2file_quantization and args.model_export not in (None, ["hf_format"]):
        raise ConfigError("--file2file_quantization writes only --model_export hf_format: give that value, or leave --model_export out")
    in_order({name: algorithms().get(canonical_algorithm(name)) for name in args.quant_algo or ()})  # refuses two of one role
    for name, file in args.quant_algo_config_file or ():
        if not Path(file).is_file():
            raise ConfigError(f"--quant_algo_config_file {name}: there is no file '{file}'")
    _refuse_missing_packages(args)


def _refuse_missing_packages(args: argparse.Namespace) -> None:
    """Raise MissingPluginError if a package that the evaluation needs is not installed."""
    if args.skip_evaluation or args.file2file_quantization:
        return
    extra("datasets", "Evaluations on WikiText, without --skip_evaluation,")
    if args.tasks is not None:
        extra("lm_eval", "--tasks")


def exporter_named(name: str, args: argparse.Namespace) -> str:
    """Return the name of the exporter for ``name``, a value of ``--model_export``.

    The result also depends on ``--custom_mode``.
    """
    return str(args.custom_mode) if EXPORTERS[name] == "quark" else EXPORTERS[name]


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_dir", required=True, help="directory of the model, or its name on the Hugging Face Hub")
    parser.add_argument("--revision", help="revision of a model of the Hub")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cuda is the CPU on a machine without CUDA")
    parser.add_argument("--multi_gpu", nargs="?", const="auto", choices=["auto", "balanced"], help="one device is used")
    parser.add_argument("--multi_device", action="store_true", help="one device is used; for several, run torchrun -m quark quantize")
    parser.add_argument("--model_attn_implementation", default="eager", choices=["eager", "sdpa", "flash_attention_2"])
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--trust_remote_code", action="store_true", default=True, help="without effect: code from a checkpoint is never run")
    code.add_argument("--no_trust_remote_code", action="store_false", dest="trust_remote_code", help="without effect")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="pileval", help="data set by name, or a file or directory; `quark datasets` lists names")
    parser.add_argument("--data_type", default="auto", choices=["auto", "float16", "bfloat16", "float32"], help="dtype of the model")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a calibration sequence")
    parser.add_argument("--batch_size", type=int, default=1, help="calibration sequences in a batch")
    parser.add_argument("--num_calib_data", type=int, default=512, help="calibration sequences")


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip_quantization", action="store_true")
    parser.add_argument("--file2file_quantization", action="store_true", help="the older name of --quant_flow file2file")
    parser.add_argument(
        "--quant_flow",
        choices=["standard", "file2file", "per_block"],
        help="file2file: from disk to disk, with one block in memory at a time; the others: the whole model in memory",
    )
    parser.add_argument("--gpu_resident_blocks", type=int, default=0, help="without effect: quark quantizes one block at a time")
    parser.add_argument("--template_file", help="JSON file with the template of the model's family")
    parser.add_argument("--quant_scheme", help="scheme of all layers; `quark schemes` lists them with their older names")
    parser.add_argument("--group_size", type=int, help="elements in a group, if the scheme has several sizes")
    parser.add_argument("--group_size_per_layer", action="append", nargs=2, metavar=("PATTERN", "SIZE"), help="group size for some layers")
    parser.add_argument("--layer_quant_scheme", action="append", nargs=2, metavar=("PATTERN", "SCHEME"), help="scheme of some layers")
    parser.add_argument("--kv_cache_dtype", "--kv_cache_quant_scheme", help="scheme of the key-value cache, such as fp8")
    parser.add_argument("--min_kv_scale", type=float, default=0.0, help="floor of the cache's scales")
    parser.add_argument("--kv_cache_post_rope", action="store_true", help="quantize keys after the rotary embedding")
    parser.add_argument("--attention_dtype", help="scheme of attention, such as fp8")
    parser.add_argument("--quant_algo", type=lambda text: text.split(","), metavar="NAME,NAME", help="algorithms, in order")
    parser.add_argument(
        "--quant_algo_config_file", action="append", nargs=2, metavar=("NAME", "FILE"), help="settings of an algorithm as JSON"
    )
    parser.add_argument(
        "--exclude_layers", nargs="*", help="patterns of layers that stay in float; without a pattern, all layers are quantized"
    )
    parser.add_argument("--enable_native_inference", action="store_true", help="without effect")
    parser.add_argument("--native_linear_mode", default="auto", choices=["auto", "fp8_per_tensor"], help="without effect")
    parser.add_argument("--no_keep_prequantized_layers", action="store_true", help="dequantize excluded layers")
    parser.add_argument("--use_tp", action="store_true", help="not offered")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_reload", action="store_true", help="load an exported model instead of quantizing one")
    parser.add_argument("--import_model_dir", help="directory of that export; by default --model_dir")
    parser.add_argument("--params_load", action="store_true", help="load the files of --params_save, and do not quantize")
    parser.add_argument("--json_path", help="its configuration")
    parser.add_argument("--safetensors_path", help="its tensors")
    parser.add_argument("--model_export", action="append", choices=list(EXPORTERS), help="what to write; may be repeated")
    parser.add_argument("--custom_mode", default="quark", help="layout of the checkpoint; `quark exporters` lists them")
    parser.add_argument("--torch_compile", action="store_true", help="without effect")
    parser.add_argument("--pack_method", default="reorder", choices=["order", "reorder"])
    parser.add_argument("--output_dir", default="exported_model")
    parser.add_argument("--export_weight_format", default="real_quantized", choices=["fake_quantized", "real_quantized"])
    parser.add_argument("--params_save", action="store_true", help="write <model type>.json and .safetensors, for --params_load")
    parser.add_argument("--save_dir", default="model_params", help="directory for --params_save")


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip_evaluation", action="store_true")
    parser.add_argument("--evaluation_dataset", default="wikitext", choices=["wikitext", "wikitext_gpt_oss_120b", "wikitext_gpt_oss_20b"])
    parser.add_argument(
        "--use_ppl_eval_model", action="store_true", help="without effect: every evaluation includes perplexity on WikiText"
    )
    parser.add_argument("--save_metrics_to_csv", action="store_true")
    parser.add_argument("--metrics_output_dir", default="metrics_output_dir")
    parser.add_argument("--tasks", metavar="TASK,TASK", help="tasks of lm-evaluation-harness")
    parser.add_argument("--use_ppl_eval_for_kv_cache", action="store_true")
    parser.add_argument("--ppl_eval_for_kv_cache_context_size", type=int, default=1024)
    parser.add_argument("--ppl_eval_for_kv_cache_sample_size", type=int, default=512)
    parser.add_argument("--ppl_eval_for_kv_cache_patch_size", type=int)
    parser.add_argument("--eval_batch_size", default=1, metavar="auto|N")
    parser.add_argument("--max_eval_batch_size", type=int, default=64)
    parser.add_argument("--num_eval_data", type=int, default=-1, help="rows of the evaluation data; -1 for all")
    parser.add_argument("--num_fewshot", type=int)
    parser.add_argument("--apply_chat_template", action="store_true")
    parser.add_argument("--use_mlperf_rouge", action="store_true", help="not offered")
    parser.add_argument("--eval_data_dir", help="without effect")
