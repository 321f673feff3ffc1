"""Checks of the tiny model after it is quantized with a scheme, exported and loaded."""

from __future__ import annotations

import math
import shutil
import weakref
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.config.describe import effective_bits
from quark.config.layer import levels
from quark.config.model import QConfig
from quark.errors import CalibrationError
from quark.models.hf.loading import unpack_model
from quark.models.hf.shards import DTYPES, check_shards
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan, static_activations
from quark.plugins import Catalog
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_devkit.check import NotApplicableError, assume, check, raises, require
from quark_devkit.checks.scheme.tensors import config_of
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import contents, require_copies
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir, tiny_template

_WIDTH = 128
_SHARED_BITS = 0.6
"""Bits that scales and zero points of tensors and channels add per element of a 256 × 256 layer.
"""


@attrs.frozen(eq=False, slots=False)
class Finished:
    """The tiny model, quantized in memory and exported.

    Attributes:
        model: The quantized model.
        logits: The logits of the quantized model for `_tokens`.
        path: Directory of the checkpoint. It is removed when this object is destroyed.
    """

    model: nn.Module
    logits: Tensor
    path: Path

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self.path.parent, ignore_errors=True)


def _first_row(finished: Finished) -> PlanRow:
    """Return the row of the first quantized layer in the plan, in the order of the model."""
    plan: QuantPlan = finished.model.quark_plan  # type: ignore[assignment]
    return plan.quantized[0]


def _tokens() -> list[Tensor]:
    return calibration_batches(2, 32)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(tokens).logits for tokens in _tokens()])


def _model_config(subject: Subject, **parts: Any) -> QConfig:
    return tiny_template().get_config(subject.lookup_name, **parts)


def _finished(subject: Subject) -> Finished:
    """Return the tiny model, quantized with the scheme and exported.

    Raises:
        NotApplicableError: The scheme's groups are too wide for the tiny model.
    """
    layer = config_of(subject)
    sizes = [level.group_size or 1 for spec in (layer.weight, layer.input_tensors) for level in levels(spec)]
    if wide := [size for size in sizes if size > 0 and _WIDTH % size]:
        raise NotApplicableError(f"its groups of {wide[0]} do not divide the tiny model's layers, whose widths are multiples of {_WIDTH}")
    return _quantized(subject.lookup_name, subject.catalog, subject.catalog.schemes.revision)


@lru_cache(maxsize=2)
def _quantized(name: str, plugins: Catalog, revision: object) -> Finished:
    """Quantize the tiny model and export it, once for all checks of a scheme."""
    config = tiny_template().get_config(name)
    model: nn.Module = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16), _tokens())
    finished = Finished(model, _logits(model), Path(mkdtemp(prefix="quark-conformance-")) / "memory")
    export_safetensors(model, finished.path)
    return finished


def _loaded(path: Path) -> Any:
    return import_model_from_safetensors(None, path, device="cpu")


@check("scheme")
def quantizes_a_model(subject: Subject) -> None:
    """In the tiny model, every planned layer gets the scheme's configuration. The logits are finite and
    differ from the float model's.
    """
    finished = _finished(subject)
    require(bool(finished.logits.isfinite().all()), "gives logits that are NaN or infinite")
    plan: Any = finished.model.quark_plan
    require(plan.quantized, "quantizes no layer of the tiny model")
    other = [row.name for row in plan.quantized if row.config != config_of(subject)]
    require(not other, f"gives {len(other)} layers a configuration that is not the scheme's, such as '{''.join(other[:1])}'")
    require(not torch.equal(finished.logits, _logits(tiny_model(torch.bfloat16))), "does not change the logits of the model")


@check("scheme")
def loads_to_the_same_logits(subject: Subject) -> None:
    """An exported and loaded model gives the same logits, to the bit."""
    finished = _finished(subject)
    difference = float((_logits(_loaded(finished.path)) - finished.logits).abs().max())
    require(difference == 0, f"gives logits that differ by {difference:.3g} after export and loading")


@check("scheme", since=2)
def is_copied_and_pickled(subject: Subject) -> None:
    """The quantized model can be copied deeply, and pickled for another process, with the same logits."""
    require_copies(_finished(subject).model, _logits)


@check("scheme", since=2)
def computes_from_codes(subject: Subject) -> None:
    """A float32 model with packed weights gives the same logits as the unpacked model, to the
    bit, each time.
    """
    packed = import_model_from_safetensors(tiny_model(), _finished(subject).path, device="cpu", packed=True)
    found = {"first": _logits(packed), "second": _logits(packed)}
    expected = _logits(unpack_model(packed))
    for time, logits in found.items():
        difference = float((logits - expected).abs().max())
        require(difference == 0, f"gives logits that differ by {difference:.3g} in the {time} forward from codes")


@check("scheme")
def streams_to_the_same_bytes(subject: Subject) -> None:
    """A run from disk, block by block, writes the same checkpoint as an export from memory, byte for byte."""
    finished = _finished(subject)
    out = finished.path.with_name("streamed")
    shutil.rmtree(out, ignore_errors=True)
    quantize_checkpoint(tiny_model_dir(), out, _model_config(subject), _tokens())
    one, other = contents(finished.path), contents(out)
    require(one.keys() == other.keys(), "writes different files from disk than from memory")
    differ = [name for name in one if one[name] != other[name]]
    require(not differ, f"writes different bytes from disk than from memory in {', '.join(differ)}")


@check("scheme")
def stores_its_effective_bits(subject: Subject) -> None:
    """A stored weight takes the number of bits per element that listings show, plus the scales of tensors and
    channels."""
    weight, formats = config_of(subject).weight, subject.catalog.formats
    said = effective_bits(weight, lambda name: float(formats.get(name).bits))
    if said is None:
        raise NotApplicableError("it leaves weights float")
    finished = _finished(subject)
    row = _first_row(finished)
    stored = 0
    for shard in check_shards(finished.path):
        for name, (dtype, shape) in shard.tensors.items():
            if name.startswith(f"{row.name}.weight"):
                stored += math.prod(shape) * DTYPES[dtype].itemsize * 8
    bits = stored / math.prod(row.shape)
    require(said <= bits * 1.001 and bits <= said + _SHARED_BITS, f"stores {bits:.4g} bits for an element, but listings show {said:.4g}")


@check("scheme")
def calibrates_static_activations(subject: Subject) -> None:
    """Static input scales are computed from the calibration data. A run without data is refused."""
    layer = config_of(subject)
    assume(list(static_activations(layer)) and layer.input_tensors is not None, "it has no static input scales")
    is_refused = raises(CalibrationError, ModelQuantizer(_model_config(subject)).quantize_model, tiny_model(torch.bfloat16))
    require(is_refused, "has static input scales, but runs without calibration data")
    finished = _finished(subject)
    name = _first_row(finished).name
    module: Any = finished.model.get_submodule(name).input_quantizer
    # No quantized layer precedes the first layer, so its input equals the float model's.
    observer, model = module.quantizer.observer(), tiny_model(torch.bfloat16)
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: observer.observe(args[0]))
    _logits(model)
    hook.remove()
    wanted, seen = module.quantizer.qparams_from(observer).scale.float(), module.qparams.scale.float()
    is_close = torch.allclose(seen, wanted, rtol=1e-6)
    require(is_close, f"has the input scale {seen.flatten()[:1].tolist()}, but the data give {wanted.flatten()[:1].tolist()}")


@check("scheme")
def serves_parts_of_attention(subject: Subject) -> None:
    """If the record offers a KV cache or attention, the model is quantized with it, and the logits are equal
    after export and loading."""
    record = subject.record
    offered = {"kv_cache_scheme": record.kv_cache, "attention_scheme": record.attention}
    parts = [part for part, reference in offered.items() if reference is not None]
    assume(parts, "its record offers neither kv_cache nor attention")
    for part in parts:
        with TemporaryDirectory(prefix="quark-conformance-", ignore_cleanup_errors=True) as directory:
            config = _model_config(subject, **{part: subject.lookup_name})
            model = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16), _tokens())
            export_safetensors(model, Path(directory) / "out")
            logits = _logits(model)
            require(bool(logits.isfinite().all()), f"gives logits that are NaN or infinite as {part}")
            require(not torch.equal(logits, _finished(subject).logits), f"changes nothing as {part}")
            same = torch.equal(_logits(_loaded(Path(directory) / "out")), logits)
            require(same, f"gives different logits as {part} after export and loading")
