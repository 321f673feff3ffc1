"""Checks of checkpoint layouts: files are recognized, complete and loadable."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from quark.checkpoint import ExportOptions, ReadsOwnFiles
from quark.checkpoint.export import export_with
from quark.checkpoint.inspection import inspect_checkpoint
from quark.checkpoint.layout_reader import quantization_block, reader_of
from quark.checkpoint.reader import import_model_from_safetensors
from quark.checkpoint.transformers_loading import is_read_here, register_layouts
from quark.errors import UnsupportedError
from quark.models.hf.dequantizer import DequantizedTensors
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import check_shards
from quark.plugins import algorithms, exporters
from quark_devkit.algorithm_runs import settings_of
from quark_devkit.check import assume, check, require
from quark_devkit.checks.layout.exports import (
    ANY_TOKENIZER,
    REFUSALS,
    exported,
    first_stored,
    sharded_export,
    source_export,
    stored_exports,
    stored_model,
    temporary,
)
from quark_devkit.small_models import logits, quantized, run_config
from quark_devkit.subject import Subject, find_subject
from quark_devkit.whole_runs import require_reload, require_same_logits

WRITTEN = {"quantization_config", "dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path"}
"""Keys of config.json that an export sets."""


def _with_reader(subject: Subject) -> None:
    assume(subject.record.reader is not None, "its record names no reader")


def _from_pretrained(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    return model


@check("layout")
def is_recognized(subject: Subject) -> None:
    """``quant_methods`` and ``marks`` of the record recognize the layout's checkpoints, and no others."""
    _with_reader(subject)
    with exported(subject) as out:
        block = quantization_block(out)
        names = exporters().fitting(block)
        method = block.get("quant_method")
        require(subject.name in names, f"writes checkpoints with quant_method {method!r}, which its record does not recognize")
        require(len(names) == 1, f"writes checkpoints that also match the layout '{[n for n in names if n != subject.name][:1]}'")


@check("layout", since=2)
def keeps_branches_or_refuses_them(subject: Subject) -> None:
    """A model with branches beside its layers has the same logits, to the bit, when it is read back, unless
    the layout refuses it."""
    names = [record.name for record in algorithms() if record.kind == "branch" and record.processor is not None]
    assume(names, "no installed algorithm puts branches beside layers: install quark-algos")
    settings = settings_of(find_subject(subject.catalog, "branch", names[0]))
    model = quantized(run_config(first_stored(subject), settings))
    with temporary() as parent:
        try:
            export_with(subject.lookup_name, model, parent / "out")
        except UnsupportedError:
            return
        _with_reader(subject)
        require_same_logits(model, parent / "out")


@check("layout")
def reloads_to_the_same_logits(subject: Subject) -> None:
    """An exported and loaded model has the same logits, to the bit, in every stored scheme, also in 16 bits.

    One model has biases and tied embeddings; another has fused projections and a separate head. For a layout
    with the capability ``rounds_scales``, the check starts from a loaded model, whose scales are rounded.
    """
    _with_reader(subject)
    schemes = []
    for scheme, model, out in stored_exports(subject):
        schemes.append(scheme)
        if _rounds_scales(subject):
            require_reload(import_model_from_safetensors(None, out, device="cpu"), subject.lookup_name)
        else:
            require_same_logits(model, out)
    model = quantized(run_config(schemes[0]), torch.bfloat16)
    require_reload(_with_scales_as_stored(subject, model), subject.lookup_name)
    with suppress(*REFUSALS):  # it may refuse a family
        model = _with_scales_as_stored(subject, quantized(run_config(schemes[0]), is_fused=True))
        require_reload(model, subject.lookup_name)


@check("layout", since=2)
def runs_from_codes(subject: Subject) -> None:
    """A model with packed weights gives the same logits as the unpacked model, to the bit, in every stored
    scheme.
    """
    _with_reader(subject)
    for scheme, _, out in stored_exports(subject):
        packed, unpacked = (import_model_from_safetensors(None, out, device="cpu", packed=is_packed) for is_packed in (True, False))
        same = torch.equal(logits(packed), logits(unpacked))
        require(same, f"returns different logits from the codes of a checkpoint in '{scheme}' than from its unpacked weights")


@check("layout", needs="rounds_scales", level="optional")
def keeps_codes_and_rounds_scales(subject: Subject) -> None:
    """In every stored scheme, loaded weights have the codes of the exported weights, and the exported scales
    rounded to at least 8 bits."""
    _with_reader(subject)
    for scheme, model, out in stored_exports(subject):
        one, other = model.state_dict(), import_model_from_safetensors(None, out, device="cpu").state_dict()
        for name in (name for name in one if name.endswith(".weight") and name in other):
            near = torch.allclose(one[name], other[name], rtol=2.0**-8, atol=0)
            require(near, f"reads '{name}' of a checkpoint in '{scheme}' with different codes than it wrote")


def _rounds_scales(subject: Subject) -> bool:
    return subject.declares("rounds_scales")


def _with_scales_as_stored(subject: Subject, model: nn.Module) -> nn.Module:
    """Return the model. If the layout rounds scales, return the model that is read back from an export
    instead."""
    if not _rounds_scales(subject):
        return model
    with exported(subject, model) as out:
        return import_model_from_safetensors(None, out, device="cpu")


@check("layout")
def dequantizes_what_it_wrote(subject: Subject) -> None:
    """The dequantizer returns the weights of the loaded model, to the bit, in every stored scheme."""
    _with_reader(subject)
    assume(subject.record.dequantizer is not None, "its record names no dequantizer")
    for scheme, model, out in stored_exports(subject):
        shards = check_shards(out)
        tensors = DequantizedTensors(FileTensors(shards), float_tensors_of(out, shards) or (), out)
        loaded = import_model_from_safetensors(None, out, device="cpu").state_dict()
        with tensors.reading(torch.device("cpu")) as read:
            for name in tensors.meta:
                weight = loaded.get(name)
                same = weight is None or torch.equal(read(name, weight.dtype).to(weight.dtype), weight)
                require(same, f"dequantizes '{name}' of a checkpoint in '{scheme}' to values that differ from the loaded model's weight")
        missing = [name for name, _ in model.named_parameters() if name.endswith(".weight") and name not in tensors.meta]
        require(not missing, f"does not dequantize '{missing[0] if missing else ''}' of a checkpoint in '{scheme}'")


@check("layout")
def is_inspected(subject: Subject) -> None:
    """The inspector finds no damage in checkpoints of the layout. For each runtime, the inspector names the
    runtime's methods for the checkpoint, or the reasons why the runtime refuses it.
    """
    assume(subject.record.inspector is not None, "its record names no inspector")
    for scheme, _, out in stored_exports(subject):
        inspection = inspect_checkpoint(out)
        require(not inspection.damage, f"reports its own checkpoint in '{scheme}' as damaged: {inspection.damage[:1]}")
        require(inspection.runtimes, f"names no runtime for a checkpoint in '{scheme}'")
        for support in inspection.runtimes:
            said = support.methods or support.refusals
            require(said, f"names, for a checkpoint in '{scheme}', neither a method of {support.runtime} nor a reason why that refuses it")


@check("layout")
def transformers_reads_it(subject: Subject) -> None:
    """If ``from_pretrained`` of transformers calls the layout's reader, the model that it loads has the same
    logits."""
    _with_reader(subject)
    reads_own_files = isinstance(reader_of(subject.lookup_name), ReadsOwnFiles)
    assume(not reads_own_files, "its reader reads files of its own format, which transformers cannot read")
    register_layouts()
    is_called = any(map(is_read_here, subject.record.quant_methods))
    assume(is_called, "transformers has its own reader for this quant_method, and does not call this one")
    model = _with_scales_as_stored(subject, stored_model(subject))
    require_reload(model, subject.lookup_name, _from_pretrained)


@check("layout")
def honours_or_refuses_common_options(subject: Subject) -> None:
    """With each common option, a loaded export has the same logits, or the option is refused
    with a reason.
    """
    _with_reader(subject)
    model = _with_scales_as_stored(subject, stored_model(subject))
    given = ({"pack_method": "order"}, {"weight_format": "fake_quantized"}, {"max_shard_bytes": 20_000}, {"zero_points": False})
    for fields in given:
        options = ExportOptions(**fields)
        try:
            require_reload(model, subject.lookup_name, options=options)
        except REFUSALS as error:
            require(str(error).strip(), f"refuses {fields} without a reason")


@check("layout")
def keeps_the_configuration(subject: Subject) -> None:
    """``config.json`` keeps all entries of the float checkpoint, except entries that an export sets, such as
    ``quantization_config``.
    """
    export = source_export(subject)
    assume("config.json" in export.files, "it writes no config.json")
    before, after = export.config, json.loads(export.files["config.json"])
    different = sorted(key for key in before if key not in WRITTEN and after.get(key) != before[key])
    key = different[0] if different else ""
    require(not different, f"writes {key}={after.get(key)!r} to config.json, but the float checkpoint has {before.get(key)!r}")


@check("layout", level="advisory")
def brings_the_tokenizer(subject: Subject) -> None:
    """Tokenizer files of the float checkpoint are copied, or a given tokenizer is saved."""
    assume(not subject.declares("tokenizer_inside"), "it writes the tokenizer into its own file")
    export = source_export(subject)
    require(export.files.get("tokenizer.json") == export.tokenizer, "does not copy tokenizer.json from the float checkpoint")
    require(ANY_TOKENIZER.file in sharded_export(subject).files, "does not save the given tokenizer")
