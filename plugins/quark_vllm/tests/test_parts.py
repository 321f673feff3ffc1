"""Parts of layers equal the whole layer, in every scheme, packed or not, on any number of ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import Branch, QuantEmbedding, QuantizedLayer, QuantLinear
from quark.models.layers.layers_from_codes import RunsFromCodes, runs_from_codes
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark.runs import ModelQuantizer
from quark_vllm.parts import cut_layer, cut_weight, reads_whole_input, rows_of_rank, shared_input

ROWS, COLUMNS = 128, 512
OPTIONS: Any = {"dtype": torch.float32, "device": torch.device("cpu")}


def layer_in(scheme: str, kind: type[QuantizedLayer] = QuantLinear) -> Any:
    """A layer that runs from codes, its static scales found on a ramp."""
    torch.manual_seed(0)
    config = quark.schemes().load_config(scheme)()
    layer: Any = kind.from_float(nn.Linear(COLUMNS, ROWS) if kind is QuantLinear else nn.Embedding(ROWS, COLUMNS), config)
    quantizer, inputs = layer.weight_quantizer.quantizer, layer.input_quantizer
    if inputs is not None and inputs.is_static:
        observer = inputs.quantizer.observer()
        observer.observe(torch.linspace(-3, 3, COLUMNS)[None])
        inputs.set_qparams(inputs.quantizer.qparams_from(observer))
    qparams = quantizer.find_qparams(layer.weight.detach())
    tensors = quantizer.pack(quantizer.quantize(layer.weight.detach(), qparams), qparams)
    layer.weight_quantizer.set_qparams(qparams)
    packing = FormatPacking(quantizer, "reorder", QuantizedLayer.as_stored)
    return runs_from_codes(layer, PackedWeight(packing, tensors, (ROWS, COLUMNS), torch.float32))


class Doubled(Branch):
    """Adds twice the first channels, and keeps the others from the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x[..., :ROWS] + 1

    def rest(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[..., :ROWS]), x[..., ROWS:]], -1)


def slices(size: int, ranks: int) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(range(0, size + 1, size // ranks))]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_rows_and_columns_of_ranks_are_those_of_the_whole(scheme: str, keeps_codes: bool, x: Tensor) -> None:
    whole = layer_in(scheme)
    for ranks in (1, 2, 4):
        by_row = [cut_layer(whole, rows, slice(0, COLUMNS), keeps_codes=keeps_codes, **OPTIONS) for rows in slices(ROWS, ranks)]
        assert torch.equal(torch.cat([part.weight for part in by_row]), whole.weight)
        torch.testing.assert_close(torch.cat([part(x) for part in by_row], -1), whole(x), rtol=0, atol=1e-5)
        by_column = [cut_layer(whole, slice(0, ROWS), columns, keeps_codes=keeps_codes, **OPTIONS) for columns in slices(COLUMNS, ranks)]
        assert torch.equal(torch.cat([part.weight for part in by_column], -1), whole.weight)
        inputs = [x if reads_whole_input(whole) else x[:, columns] for columns in slices(COLUMNS, ranks)]
        sums = sum(part(own) - part.bias for part, own in zip(by_column, inputs, strict=True))
        torch.testing.assert_close(sums + whole.bias, whole(x), rtol=0, atol=1e-5)
        assert all(isinstance(part, RunsFromCodes) == keeps_codes for part in (*by_row, *by_column)), "packed where that is wanted"
    assert torch.equal(whole(x), layer_in(scheme)(x)), "the whole layer stays as it is"


@torch.no_grad()
@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8", "ptpc_fp8"])
def test_a_branch_adds_to_the_rows_and_columns_of_ranks_what_it_adds_to_the_whole(scheme: str, keeps_codes: bool, x: Tensor) -> None:
    whole = layer_in(scheme)
    whole._modules["branch"] = Doubled()
    assert (whole(x) - layer_in(scheme)(x)).abs().min() > 0
    for ranks in (1, 2, 4):
        by_row = [cut_layer(whole, rows, slice(0, COLUMNS), keeps_codes=keeps_codes, **OPTIONS) for rows in slices(ROWS, ranks)]
        torch.testing.assert_close(torch.cat([part(x) for part in by_row], -1), whole(x), rtol=0, atol=1e-5)
        by_column = [cut_layer(whole, slice(0, ROWS), columns, keeps_codes=keeps_codes, **OPTIONS) for columns in slices(COLUMNS, ranks)]
        assert all(map(reads_whole_input, by_column)), "each rank gathers, or none does"
        sums = sum(part(x) - part.bias for part in by_column)
        torch.testing.assert_close(sums + whole.bias, whole(x), rtol=0, atol=1e-5)
        assert shared_input(by_row) is None, "the product alone is not the output"


@torch.no_grad()
def test_a_group_that_ranks_would_share_is_unpacked_where_it_is_cut() -> None:
    whole = layer_in("int4_wo_128")
    part = cut_layer(whole, slice(0, ROWS), slice(64, 320), keeps_codes=True, **OPTIONS)
    assert not isinstance(part, RunsFromCodes)
    assert torch.equal(part.weight, whole.weight[:, 64:320])


@torch.no_grad()
@pytest.mark.parametrize("keeps_codes", [False, True])
def test_tokens_of_an_embedding_are_those_of_the_whole(keeps_codes: bool) -> None:
    whole = layer_in("int4_wo_32", QuantEmbedding)
    part = cut_layer(whole, slice(64, 128), slice(0, COLUMNS), keeps_codes=keeps_codes, **OPTIONS)
    assert torch.equal(part(torch.tensor([0, 3, 63])), whole(torch.tensor([64, 67, 127])))


@torch.no_grad()
@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize("scheme", ["int4_wo_32", None])
def test_rows_of_an_embedding_are_those_of_its_weight_since_vllms_models_multiply_them_themselves(
    scheme: str | None, keeps_codes: bool
) -> None:
    scaled: Any = Gemma3TextScaledWordEmbedding(128, COLUMNS, 0, embed_scale=16.0)
    if scheme is not None:
        net = nn.ModuleDict({"words": scaled})
        config = QConfig(QLayerConfig(), layer_quant_config={"words": quark.schemes().load_config(scheme)()})
        scaled = ModelQuantizer(config).quantize_model(net)["words"]  # type: ignore[index]
    part = cut_layer(scaled, slice(64, 128), slice(0, COLUMNS), keeps_codes=keeps_codes, **OPTIONS)
    assert torch.equal(part(torch.tensor([0, 3])), scaled.weight[[64, 67]])
    assert torch.equal(scaled(torch.tensor([64])), 16 * scaled.weight[[64]]), "the checkpoint's own layer is as it was"


@torch.no_grad()
def test_inputs_are_rotated_before_their_channels_are_taken(x: Tensor) -> None:
    whole = layer_in("int4_wo_32")
    whole.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),))
    parts = [cut_layer(whole, slice(0, ROWS), columns, keeps_codes=True, **OPTIONS) for columns in slices(COLUMNS, 2)]
    assert all(map(reads_whole_input, parts))
    torch.testing.assert_close(sum(part(x) for part in parts) - whole.bias, whole(x), rtol=0, atol=1e-5)


def test_a_cast_changes_values_and_no_scale() -> None:
    whole = layer_in("int8")
    scale = whole.input_quantizer.scale
    for keeps_codes in (False, True):
        options = {**OPTIONS, "dtype": torch.bfloat16, "keeps_codes": keeps_codes}
        part: Any = cut_layer(whole, slice(0, ROWS), slice(0, COLUMNS), **options)
        assert (part.weight.dtype, part.bias.dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(part.input_quantizer.scale, scale)
        assert torch.equal(part.weight, whole.weight.bfloat16())


def test_heads_of_keys_are_repeated_where_ranks_are_more_than_they() -> None:
    of_each = [rows_of_rank([64, 16, 16], [16, 8, 8], rank, 4) for rank in range(4)]
    assert [(q.start, k.start, v.start) for q, k, v in of_each] == [(0, 64, 80), (16, 64, 80), (32, 72, 88), (48, 72, 88)]
    assert rows_of_rank([48], [48], 3, 4) == [slice(0, 48)], "a replicated layer"


def test_all_of_a_weight_is_the_weight_itself_and_not_unpacked_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = layer_in("int4_wo_64").packed_weight
    monkeypatch.setattr(PackedWeight, "values", None)
    assert cut_weight(weight, slice(0, ROWS), slice(0, COLUMNS)) is weight


@torch.no_grad()
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_layers_multiply_the_input_that_they_share(scheme: str, x: Tensor) -> None:
    config = quark.schemes().load_config(scheme)()
    first, second = (cut_layer(layer_in(scheme), slice(0, ROWS), slice(0, COLUMNS), keeps_codes=False, **OPTIONS) for _ in range(2))
    alone, both = shared_input([first]), shared_input([first, second])
    assert alone is not None
    torch.testing.assert_close(torch.nn.functional.linear(alone(x), first.weight, first.bias), first(x), rtol=0, atol=1e-5)
    is_static = config.input_tensors is not None and first.input_quantizer.is_static
    assert (both is None) == is_static, "static scales are the layer's own"
    assert both is None or torch.equal(both(x), alone(x))
    assert (shared_input([first, nn.Linear(COLUMNS, ROWS)]) is None) == (config.input_tensors is not None)
    second.register_forward_hook(lambda *_: None)
    assert shared_input([second]) is None, "its output is changed"


def test_a_rotated_input_is_shared_with_no_other_layer() -> None:
    one, other = (cut_layer(layer_in("mx6"), slice(0, ROWS), slice(0, COLUMNS), keeps_codes=False, **OPTIONS) for _ in range(2))
    one.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),))
    alone = shared_input([one])
    assert alone is not None
    x = torch.randn(3, COLUMNS)
    assert torch.equal(alone(x), one.input_quantizer(x.flip(-1)))
    assert shared_input([one, other]) is None


def test_an_input_of_layers_that_may_compute_otherwise_is_not_shared() -> None:
    class Other(nn.Linear):
        """A linear layer of a third party."""

    assert shared_input([Other(4, 2)]) is None
    assert shared_input([nn.Linear(4, 2)]) is not None
