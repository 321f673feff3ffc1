"""Checks that a checkpoint stores all of a quantized model: settings of single layers, modules beside layers,
and layers of odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import attrs
from torch import nn

from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.checkpoint.reader import import_model_from_safetensors
from quark.config.algorithm import AlgoConfig
from quark.config.templates.algorithms import with_options
from quark.models.layers import counts_as
from quark.numbers import TensorQuantizer, quantizer_for
from quark.plugins import algorithms, schemes
from quark.runs import ModelQuantizer
from quark_devkit.algorithm_runs import settings_of
from quark_devkit.check import NotApplicableError, assume, check, require
from quark_devkit.checks.layout.exports import REFUSALS, exported, first_stored, stored_model, temporary
from quark_devkit.option_effects import digest
from quark_devkit.small_models import batches, fitting_schemes, quantized, run_config, small_model, with_cache
from quark_devkit.subject import Subject, find_subject
from quark_devkit.whole_runs import contents, every_validation, require_copies, require_same_logits
from quark_devkit.works import wide_data

_ODD = 52
"""Rows and columns of the small model's MLP, which neither 8 nor 64 divides."""


def _require_kept(subject: Subject, model: nn.Module, options: ExportOptions | None = None) -> bool:
    """Require that the model that is read back from an export has the same logits.

    Return False if the layout refuses the export.
    """
    assume(subject.record.reader is not None, "its record names no reader")
    assume(not subject.declares("rounds_scales"), "it rounds scales, so that logits differ")
    with temporary() as parent:
        try:
            export_with(subject.lookup_name, model, parent / "out", options)
        except REFUSALS:
            return False
        require_same_logits(model, parent / "out")
    return True


def _stored_schemes(subject: Subject) -> list[str]:
    """Return up to two schemes that the layout stores."""
    stored = []
    for scheme in fitting_schemes():
        with suppress(*REFUSALS), temporary() as parent:
            export_with(subject.lookup_name, quantized(run_config(scheme)), parent / "out")
            stored.append(scheme)
        if len(stored) > 1:
            break
    return stored


def _quantizer_of(scheme: str) -> TensorQuantizer:
    weight = schemes().load_config(scheme)().weight
    assert weight is not None  # each fitting scheme quantizes weights
    return quantizer_for(weight, activation=False)


@check("layout", since=2)
def keeps_settings_of_single_layers(subject: Subject) -> None:
    """A model with two schemes and with float layers has the same logits when it is read back, unless the
    layout refuses it."""
    assume(subject.record.reader is not None, "its record names no reader")
    names = _stored_schemes(subject)
    first, last = (schemes().load_config(name)() for name in (names[0], names[-1]))
    config = run_config(first, exclude=("*.layers.0.self_attn.*",))
    by_name = attrs.evolve(config, layer_quant_config={"*.down_proj": last})
    _require_kept(subject, quantized(by_name))
    by_type = attrs.evolve(config, global_quant_config=last, layer_type_quant_config={nn.Linear: first})
    with suppress(*REFUSALS):  # a plan may refuse it
        _require_kept(subject, quantized(by_type))


@check("layout", since=2)
def keeps_what_runs_with_the_model(subject: Subject) -> None:
    """A model with a quantized cache, or with modules of a transform, has the same logits when it is read
    back, unless the layout refuses it."""
    scheme = first_stored(subject)
    _require_kept(subject, quantized(with_cache(run_config(scheme))))
    for settings in _settings_that_run_with_the_model(subject):
        with every_validation(is_improvement=True):
            model = quantized(run_config(scheme, settings))
        _require_kept(subject, model)


def _settings_that_run_with_the_model(subject: Subject) -> Iterator[AlgoConfig]:
    """Yield the settings of each transform that leave modules in the model.

    The settings to try are the default settings, and settings in which exactly one boolean option is True.
    """
    for name in [record.name for record in algorithms() if record.kind == "transform" and record.restorer is not None]:
        with suppress(NotApplicableError):  # it may refuse the family of the small model
            settings = settings_of(find_subject(subject.catalog, "transform", name))
            flags = [option.name for option in algorithms().options(name) if isinstance(getattr(settings, option.name), bool)]
            changed = (with_options(name, settings, {flag: flag == one for flag in flags}) for one in flags)
            yield from (one for one in (settings, *changed) if one.runs_with_model())


@check("layout", since=2)
def stores_layers_of_odd_sizes(subject: Subject) -> None:
    """Layers whose numbers of rows and columns are no multiples of 8 give the same logits when they are read
    back, unless the layout refuses them."""
    for scheme in fitting_schemes():
        config = run_config(scheme)
        quantizer = _quantizer_of(scheme)
        if any(quantizer.shape_error(shape) for shape in ((_ODD, 64), (64, _ODD))):
            continue
        model = ModelQuantizer(config).quantize_model(_odd_model(), batches())
        if _require_kept(subject, model):
            return


def _odd_model() -> nn.Module:
    """Return the small model with narrower MLPs."""
    model: Any = small_model()
    for name, layer in list(model.named_modules()):
        if counts_as(layer) is nn.Linear and ".mlp." in name:
            weight, bias = layer.weight, layer.bias
            layer.weight = nn.Parameter(weight[:, :_ODD] if name.endswith("down_proj") else weight[:_ODD], requires_grad=False)
            if bias is not None and not name.endswith("down_proj"):
                layer.bias = nn.Parameter(bias[:_ODD], requires_grad=False)
            layer.out_features, layer.in_features = layer.weight.shape
    model.config.intermediate_size = _ODD
    return model


@check("layout", since=2)
def reads_packed_codes_in_any_order(subject: Subject) -> None:
    """In a scheme whose packing depends on the order of codes (``pack_method``), a loaded model has the same
    logits for each order, unless the layout refuses the option."""
    for scheme in fitting_schemes():
        quantizer = _quantizer_of(scheme)
        values, qparams = quantizer.round_to_nearest(wide_data((64, 128)))
        codes = quantizer.codes_of(values, qparams)
        packed = [quantizer.pack(codes, qparams, order=order) for order in ("order", "reorder")]
        if digest(*packed[0].values()) == digest(*packed[1].values()):
            continue
        model = quantized(run_config(scheme))
        kept = [_require_kept(subject, model, ExportOptions(pack_method=order)) for order in ("order", "reorder")]
        if all(kept):
            return
    raise NotApplicableError("it stores no scheme whose packing depends on the order of codes")


@check("layout", since=2)
def stores_values_if_it_is_asked_to(subject: Subject) -> None:
    """With ``weight_format="fake_quantized"``, an export stores rounded values, which take more bytes than
    codes, unless the layout refuses the option."""
    sizes = []
    for options in (None, ExportOptions(weight_format="fake_quantized")):
        with suppress(*REFUSALS), exported(subject, options=options) as out:
            sizes.append(sum(map(len, contents(out).values())))
    require(all(one < other for one, other in pairwise(sizes)), "stores codes although weight_format='fake_quantized' asks for values")


@check("layout", since=2)
def reads_the_files_that_are_there(subject: Subject) -> None:
    """After an export has replaced another one in the same directory, the reader reads the new one."""
    scheme = first_stored(subject)
    assume(subject.record.reader is not None, "its record names no reader")
    with temporary() as parent:
        for exclude in ((), ("*.mlp.*",)):
            model = quantized(run_config(scheme, exclude=exclude))
            export_with(subject.lookup_name, model, parent / "out", ExportOptions(overwrite=True))
            read = import_model_from_safetensors(None, parent / "out", device="cpu")
            floats = {n: type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")}
            again = {n: type(m).__name__ for n, m in read.named_modules() if n.endswith("_proj")}
            require(floats == again, "reads an earlier checkpoint of the same directory: cache nothing by its path")


@check("layout", since=2)
def reads_a_model_that_is_copied(subject: Subject) -> None:
    """A loaded model can be copied deeply and pickled for another process, with the same logits."""
    assume(subject.record.reader is not None, "its record names no reader")
    with temporary() as parent:
        export_with(subject.lookup_name, stored_model(subject), parent / "out")
        require_copies(import_model_from_safetensors(None, parent / "out", device="cpu"))
