"""A format may store scales under its own suffixes; both readers find them, and refuse other suffixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.errors import PluginError
from quark.models.layers.coded_layer import packed_meta
from quark.numbers import Packing, QParams, number_format, quantizer_for
from quark.plugins import FormatRecord, Source, formats, schemes
from quark.runs import ModelQuantizer
from quark_devkit.small_models import batches, logits, run_config, small_model

INT8: Any = number_format("int8")
OWN = ("codebook", "scale_codebook", "scale_2", "lookup")


@attrs.frozen
class Renames(Packing):
    """Has another suffix for scales, and stores them twice."""

    suffix: str = "codebook"

    def pack_qparams(self, qparams: QParams, *others: Any) -> dict[str, torch.Tensor]:
        stored = super().pack_qparams(qparams, *others)
        return {**stored, self.suffix: stored["scale"] * 4}

    def unpack_qparams(self, tensors: dict[str, torch.Tensor], *others: Any) -> QParams:
        return super().unpack_qparams({**tensors, "scale": tensors[self.suffix] / 4}, *others)


def format_of(suffix: str) -> str:
    return f"suffix_{suffix.replace('.', '_')}"


for _suffix in (*OWN, "a.table"):
    globals()[format_of(_suffix)] = attrs.evolve(INT8, name=format_of(_suffix), packing=Renames(_suffix))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    names = [format_of(suffix) for suffix in (*OWN, "a.table")]
    for name in names:
        formats().register(FormatRecord(name=name, format=f"{__name__}:{name}", bits=8), Source("suffix-quant", "0.3"))
    yield
    for name in names:
        formats().unregister(name)


@pytest.mark.parametrize("suffix", OWN)
def test_both_readers_find_tensors_of_weights_and_inputs_under_it(suffix: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    layer: Any = schemes().load_config("int8")()
    own = {slot: attrs.evolve(getattr(layer, slot), dtype=format_of(suffix)) for slot in ("weight", "input_tensors")}
    model = ModelQuantizer(run_config(attrs.evolve(layer, **own))).quantize_model(small_model(), batches())
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)), logits(model))


def test_a_suffix_that_no_reader_can_hold_is_refused_by_the_name_of_the_format() -> None:
    quantizer = quantizer_for(attrs.evolve(schemes().load_config("int8")().weight, dtype=format_of("a.table")), activation=False)
    with pytest.raises(PluginError, match=r"'suffix_a_table' of suffix-quant 0.3 packs a tensor under the suffix 'a.table', which"):
        packed_meta(quantizer, (4, 8), "reorder")
