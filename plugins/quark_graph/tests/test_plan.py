"""The plan of a graph: names, precedence, rules without effect, refusals before any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quark.config.algorithm import AlgoConfig
from quark.config.enums import QuantizationMode
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError, ConfigError, NonFiniteError, UnknownNameError, UnsupportedError
from quark.plugins import Catalog, using
from quark.torch import ModelQuantizer
from quark_graph import GraphPlan, capture, quantize_graph

INT8 = QTensorConfig(dtype="int8", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False)
BOTH = QLayerConfig(input_tensors=INT8, output_tensors=INT8, weight=INT8)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head((y + y.cos()).flatten(1)).softmax(-1)


X = torch.randn(2, 1, 8, 8)


def graph() -> fx.GraphModule:
    return capture(Small().eval(), (X,))


def config(layer: QLayerConfig = BOTH, **fields: Any) -> QConfig:
    return QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode, **fields)


def plan(**fields: Any) -> GraphPlan:
    made = ModelQuantizer(config(**fields)).plan(graph())
    assert isinstance(made, GraphPlan)
    return made


def test_operators_have_the_names_of_their_modules() -> None:
    rows = plan().rows
    assert [row.name for row in rows] == ["stem.0", "stem.2", "add", "flatten", "head", "softmax"]
    assert [row.operator for row in rows] == ["conv2d", "relu", "add", "reshape", "linear", "softmax"]


def test_precedence_is_that_of_eager_mode() -> None:
    other = QLayerConfig(weight=INT8)
    made = plan(
        exclude=["softmax"], layer_quant_config={"stem.*": other}, layer_type_quant_config={nn.Linear: other, "Conv2d": BOTH, "add": other}
    )
    reasons = {row.name: row.reason for row in made.rows}
    assert reasons == {
        "stem.0": "pattern: stem.*",
        "stem.2": "pattern: stem.*",
        "add": "type: add",
        "flatten": "global",
        "head": "type: linear",
        "softmax": "excluded: softmax",
    }
    assert [row.name for row in made.quantized] == ["stem.0", "flatten", "head"], "a sum has no weight"


def test_the_plan_says_what_is_folded_and_what_is_not_known() -> None:
    made = plan(exclude=["hed"], layer_type_quant_config={"Softmx": BOTH})
    assert made.notes == ("1 batch norm(s) are folded into the weights in front of them",)
    pattern, kind, unknown = made.warnings
    assert "did you mean 'head'" in pattern
    assert "did you mean 'softmax'" in kind
    assert "aten::cos (cos)" in unknown
    text = str(made)
    assert "stem.0" in text
    assert made.to_dict()["rows"][0]["config"]["weight"]["dtype"] == "int8"


def test_a_pattern_that_is_like_no_name_is_answered_with_a_name_of_the_graph() -> None:
    (warning, _) = plan(exclude=["zzzzzz"]).warnings
    assert warning.endswith("has no effect; an operator of this graph is 'softmax'")
    empty = ModelQuantizer(config(exclude=["zzzzzz"])).plan(capture(nn.Identity().eval(), (X,)))
    assert empty.warnings[0].endswith("has no effect; the graph has none")


def test_the_plan_counts_the_operators_of_each_rule() -> None:
    made = plan(exclude=["stem.*"], layer_type_quant_config={"Softmx": BOTH, nn.Linear: BOTH})
    rules = [(rule.field, rule.rule, rule.layers, bool(rule.problem)) for rule in made.rules]
    types = [("layer_type_quant_config", "Softmx", 0, True), ("layer_type_quant_config", "Linear", 1, False)]
    assert rules == [("exclude", "stem.*", 2, False), *types]


def test_rules_without_effect_are_errors_where_that_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="did you mean 'head'"):
        plan(exclude=["hed"], strict=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algo_config": AlgoConfig(name="awq")}, "algo_config"),
        ({"kv_cache_quant_config": {"*k_proj": BOTH}}, "kv_cache_quant_config"),
        ({"softmax_quant_spec": INT8}, r'layer_type_quant_config=\{"softmax"'),
    ],
)
def test_what_graphs_have_not_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan(**fields)


def test_a_spec_that_does_not_fit_is_refused_with_the_operators() -> None:
    grouped = QTensorConfig(
        dtype="int8", qscheme="per_group", ch_axis=-1, group_size=7, symmetric=True, observer_cls="PerGroupMinMaxObserver"
    )
    with pytest.raises(ConfigError, match=r"cannot be quantized as asked \(weight: .*head"):
        plan(layer=QLayerConfig(weight=grouped))


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Call model.eval\(\)"):
        capture(Small(), (X,))
    training = torch.export.export(Small().train(), (X,)).module()
    with pytest.raises(ConfigError, match="in training mode"):
        quantize_graph(training, config(), [X])


def test_a_graph_of_symbolic_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="not torch operators"):
        quantize_graph(fx.symbolic_trace(Small().eval()), config(), [X])


def test_a_model_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedError, match=r"torch\.where or torch\.cond"):
        capture(Branch().eval(), (X,))


def test_a_quantized_graph_is_refused() -> None:
    quantized = quantize_graph(graph(), config(), [X])
    with pytest.raises(ConfigError, match="quantized already"):
        quantize_graph(quantized, config(), [X])


def test_a_plan_needs_a_graph() -> None:
    with pytest.raises(ConfigError, match=r"is not a graph\. Capture it"):
        ModelQuantizer(config()).plan(Small())


def test_a_checkpoint_cannot_be_quantized_so() -> None:
    with pytest.raises(UnsupportedError, match="only in eager mode"):
        ModelQuantizer(config()).direct_quantize_checkpoint("a", "b")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "calibration data is needed"),
        ([X, X[:, :, :4]], "batch 1 .*only its inputs \\(x"),
        ([(X, torch.zeros(2))], "batch 0"),
    ],
)
def test_data_that_do_not_fit_leave_the_graph_as_it_was(data: Any, message: str) -> None:
    model = graph()
    code, state = model.code, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CalibrationError, match=message):
        quantize_graph(model, config(), data)
    assert model.code == code
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_data_that_vary_in_a_fixed_size_are_refused_with_the_fix() -> None:
    model = torch.export.export(Small().eval(), (X,)).module()
    with pytest.raises(CalibrationError, match="drop_last=True"):
        quantize_graph(model, config(), [X, X[:1]])


def test_bad_numbers_are_named() -> None:
    bad = Small().eval()
    bad.head.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"head\.weight"):
        quantize_graph(capture(bad, (X,)), config(), [X])
    with pytest.raises(NonFiniteError, match=r"stem\.0\.input_quantizer"):
        quantize_graph(graph(), config(), [X * torch.inf])


def test_dynamic_activations_and_weights_alone_need_no_data() -> None:
    layer = QLayerConfig(weight=INT8, input_tensors=INT8.set(is_dynamic=True))
    model = quantize_graph(graph(), config(layer))
    assert torch.isfinite(model(X)).all()


def test_without_this_distribution_the_mode_is_refused_with_the_installation_that_helps() -> None:
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(), quant_mode=QuantizationMode.fx_graph_mode))
    with using(Catalog()), pytest.raises(UnknownNameError, match=r"no quantization mode 'fx_graph_mode'.*pip install quark-graph"):
        quantizer.quantize_model(nn.Linear(2, 2), [torch.ones(1, 2)])


def test_a_mode_of_another_name_is_asked_for_by_that_name() -> None:
    config = QConfig(global_quant_config=QLayerConfig(), quant_mode="acme_mode")  # type: ignore[arg-type]
    assert QConfig.from_dict(config.to_dict()).quant_mode == config.quant_mode == QuantizationMode("acme_mode")
    with pytest.raises(UnknownNameError, match="no quantization mode 'acme_mode'"):
        ModelQuantizer(config).plan(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="is not the name of a quantization mode"):
        QConfig(global_quant_config=QLayerConfig(), quant_mode="Acme mode")  # type: ignore[arg-type]
