"""The attention modules of a plan, and the errors and warnings of their configuration."""

import attrs
import pytest
import torch
from torch import nn

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.models.plan.attention import AttentionRow
from quark.models.plan.plan_text import plan_lines
from quark.models.plan.quant_plan import QuantPlan, make_plan

NAMES = Architecture(model_type="acme", decoder_blocks="layers", kv_layers_name=("*k_proj", "*v_proj"), q_layer_name="*q_proj")


def fp8(**changes: object) -> QTensorConfig:
    fields = {"dtype": "fp8_e4m3", "observer_cls": "PerTensorMinMaxObserver", "qscheme": "per_tensor", "symmetric": True}
    return QTensorConfig(**{**fields, "is_dynamic": False, **changes})  # type: ignore[arg-type]


def model(projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"), attention: str = "self_attn") -> nn.Module:
    """Two blocks and a tower beside them, all with attention."""
    with torch.device("meta"):
        blocks = [nn.ModuleDict({attention: nn.ModuleDict({n: nn.Linear(8, 8) for n in projections})}) for _ in range(3)]
        return nn.ModuleDict({"tower": blocks[0], "layers": nn.ModuleList(blocks[1:]), "lm_head": nn.Linear(8, 8)})


def config(*, softmax: QTensorConfig | None = None, cache: QTensorConfig | None = None, post_rope: bool | None = False) -> QConfig:
    patterns = {} if cache is None else {p: QLayerConfig(output_tensors=cache) for p in ("*k_proj", "*v_proj", "*qkv_proj")}
    return QConfig(QLayerConfig(weight=fp8()), softmax_quant_spec=softmax, kv_cache_quant_config=patterns, kv_cache_post_rope=post_rope)


def plan(**options: QTensorConfig) -> QuantPlan:
    return make_plan(model(), config(**options), NAMES)  # type: ignore[arg-type]


def two(asked: QConfig) -> QConfig:
    """The configuration omits the pattern of fused projections, which the model does not have."""
    asked.kv_cache_quant_config.pop("*qkv_proj")
    return asked


def test_attention_is_where_the_projections_of_the_decoder_blocks_are() -> None:
    assert plan(softmax=fp8()).attentions == tuple(AttentionRow(f"layers.{i}.self_attn", fp8()) for i in range(2))


def test_without_an_architecture_attention_is_what_is_called_so() -> None:
    found = make_plan(model(attention="my_attention"), config(softmax=fp8())).attentions
    assert [a.name for a in found] == ["tower.my_attention", "layers.0.my_attention", "layers.1.my_attention"]


def test_nothing_of_attention_is_planned_unless_it_is_asked_for() -> None:
    assert make_plan(model(), two(config(cache=fp8())), NAMES).attentions == ()


def test_keys_and_values_after_the_rotary_embedding_belong_to_attention() -> None:
    made = make_plan(model(), two(config(cache=fp8(), post_rope=True)), NAMES)
    assert made.attentions == tuple(
        AttentionRow(name, None, fp8(), f"{name}.k_proj", fp8(), f"{name}.v_proj") for name in ("layers.0.self_attn", "layers.1.self_attn")
    )


@pytest.mark.parametrize(("spec", "needed"), [(fp8(), True), (fp8(is_dynamic=True), False)])
def test_static_probabilities_need_calibration(spec: QTensorConfig, needed: bool) -> None:
    assert bool(plan(softmax=spec).calibrated) is needed


def test_the_plan_tells_of_attention() -> None:
    asked = two(config(softmax=fp8(), cache=fp8(), post_rope=True))
    made = make_plan(model(), asked, NAMES)
    lines = "\n".join(plan_lines(made))
    assert "attention: probabilities of 2 modules fp8_e4m3/tensor static" in lines
    for states in ("keys", "values"):
        assert f"attention: {states} of 2 modules as attention gets them, after the rotary embedding" in lines
    assert made.to_dict()["attentions"][0] == {
        "name": "layers.0.self_attn",
        "probabilities": True,
        "keys_after_rotary_embedding": "layers.0.self_attn.k_proj",
        "values_in_attention": "layers.0.self_attn.v_proj",
        "queries_after_rotary_embedding": None,
    }


def per_channel() -> QTensorConfig:
    return fp8(observer_cls="PerChannelMinMaxObserver", qscheme="per_channel", ch_axis=1, is_dynamic=True)


def refusals() -> dict[str, tuple[nn.Module, QConfig, str]]:
    unknown = config(cache=fp8(), post_rope=True)
    unknown.kv_cache_quant_config = {"*wkv": QLayerConfig(output_tensors=fp8())}
    return {
        "no attention": (
            nn.Sequential(nn.Linear(8, 8)),
            config(softmax=fp8()),
            "no attention module was found.*leave attention_scheme out",
        ),
        "no cache": (model(), config(post_rope=True), "the cache is not quantized. Add kv_cache_scheme"),
        "unknown projections": (model(("wkv",)), unknown, "'tower.self_attn.wkv' feeds the cache.*Leave kv_cache_post_rope out"),
        "scales per channel": (model(), config(softmax=per_channel()), "softmax_quant_spec must have one scale per tensor"),
        "keys per channel": (
            model(),
            two(config(cache=per_channel(), post_rope=True)),
            "output_tensors of keys and values.*one scale per tensor",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_done_is_refused_with_the_cure(case: str) -> None:
    asked_of, asked, words = refusals()[case]
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make_plan(asked_of, asked)


class Reachable(nn.ModuleDict):
    """Attention that can be switched, which the model announces as in transformers."""

    class config:
        _attn_implementation = "sdpa"

    def set_attn_implementation(self, _: object) -> None: ...

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True


def reachable(*projections: str, norm: str = "") -> nn.Module:
    made = Reachable(model(projections or ("q_proj", "k_proj", "v_proj"))._modules)  # type: ignore[arg-type]
    for block in made["layers"] if norm else ():  # type: ignore[union-attr]
        block["self_attn"][norm] = nn.Identity()
    return made


def test_where_attention_can_be_reached_the_cache_is_rounded_as_attention_gets_it() -> None:
    made = make_plan(reachable(), two(config(cache=fp8(), post_rope=None)), NAMES)
    assert made.config.kv_cache_post_rope is True
    assert [a.key_layer for a in made.attentions] == [f"layers.{i}.self_attn.k_proj" for i in range(2)]
    assert made.warnings == ()


def cached(*patterns: str, post_rope: bool | None = None) -> QConfig:
    return attrs.evolve(config(post_rope=post_rope), kv_cache_quant_config={p: QLayerConfig(output_tensors=fp8()) for p in patterns})


FUSED = Architecture(model_type="acme", decoder_blocks="layers", kv_layers_name="*wide", q_layer_name="*wide")


@pytest.mark.parametrize(
    ("layer", "facts"),
    [
        ("qkv_proj", None),
        ("query_key_value", None),
        ("wide", FUSED),
        ("wide", attrs.evolve(FUSED, query_projections=(), key_projections=(), value_projections=())),
    ],
)
@pytest.mark.parametrize("asked", [None, True])
def test_keys_and_values_of_fused_projections_are_rounded_as_attention_gets_them(
    layer: str, facts: Architecture | None, asked: bool | None
) -> None:
    made = make_plan(reachable(layer), cached(f"layers.*{layer}", post_rope=asked), facts)
    assert made.config.kv_cache_post_rope is True
    names = [f"layers.{i}.self_attn" for i in range(2)]
    assert made.attentions == tuple(AttentionRow(n, None, fp8(), f"{n}.{layer}", fp8(), f"{n}.{layer}", fused=True) for n in names)
    assert made.warnings == ()


def test_a_projection_that_gives_keys_alone_is_not_fused_whatever_patterns_match_it() -> None:
    broad = attrs.evolve(NAMES, kv_layers_name="*_proj", q_layer_name="*_proj")
    (first, *_) = make_plan(reachable(), cached("*k_proj", "*v_proj"), broad).attentions
    assert (first.key_layer, first.value_layer, first.fused) == ("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", False)


def test_queries_of_a_fused_projection_are_rounded_where_its_keys_are() -> None:
    """A fused projection has one output quantizer.

    It cannot round queries at one place and keys at another.
    """
    for post_rope, states in ((None, {"query", "key", "value"}), (False, set())):
        asked = attrs.evolve(cached("*wide", post_rope=post_rope), softmax_quant_spec=fp8())
        asked.layer_quant_config = {"*wide": QLayerConfig(weight=fp8(), output_tensors=fp8())}
        made = make_plan(reachable("wide"), asked, FUSED)
        assert made.config.attention_post_rope is (post_rope is None)
        assert {name.removesuffix("_quantizer") for row in made.attentions for name in row.states} == states


def test_fused_projections_that_are_rounded_as_they_put_out_are_warned_of() -> None:
    (warning,) = make_plan(reachable("wide"), cached("*wide", post_rope=False), FUSED).warnings
    assert "vLLM has no name for the scale of a fused projection's output" in warning


def test_a_mixer_without_a_cache_is_no_fused_projection() -> None:
    facts = attrs.evolve(FUSED, mixer=("self_attn.wide", "self_attn.out"), key_projections=(), value_projections=(), query_projections=())
    with pytest.raises(ConfigError, match=r"The output of layers\.\{0-1\}\.self_attn\.wide is neither keys, nor values"):
        make_plan(reachable("wide"), cached("*wide"), facts)


LATENT = attrs.evolve(
    NAMES,
    kv_layers_name="*kv_b_proj",
    q_layer_name="*q_b_proj",
    query_projections="self_attn.q_b_proj",
    key_projections=(),
    value_projections=(),
)


@pytest.mark.parametrize("asked", [None, True])
def test_latent_attention_with_a_quantized_cache_is_refused(asked: bool | None) -> None:
    words = r"The output of layers\.\{0-1\}\.self_attn\.kv_b_proj is neither keys, nor values.*latent.*kv_cache_post_rope=False"
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make_plan(reachable("q_b_proj", "kv_b_proj"), cached("*kv_b_proj", post_rope=asked), LATENT)


def test_the_convention_of_amd_quark_for_latent_attention_can_be_asked_for() -> None:
    made = make_plan(reachable("q_b_proj", "kv_b_proj"), cached("*kv_b_proj", post_rope=False), LATENT)
    assert (made.config.kv_cache_post_rope, made.attentions) == (False, ())
    assert "2 layers feed the quantized cache and are rounded at the projection's output" in made.warnings[0]
    assert "so runtimes do not cache it" in made.warnings[0]


def test_where_projections_are_inferred_from_names_an_unknown_one_is_rounded_as_it_puts_out() -> None:
    facts = Architecture(model_type="acme", decoder_blocks="layers", kv_layers_name="*kv_b_proj")
    made = make_plan(reachable("kv_b_proj"), cached("*kv_b_proj"), facts)
    assert (made.config.kv_cache_post_rope, made.attentions) == (False, ())
    assert "'layers.0.self_attn.kv_b_proj' feeds the cache, but its output is neither keys alone" in made.warnings[0]


def test_what_chooses_tokens_inside_attention_is_none() -> None:
    made = reachable()
    for block in made["layers"]:  # type: ignore[index]
        block["self_attn"]["indexer"] = nn.ModuleDict({n: nn.Linear(8, 8) for n in ("q_proj", "k_proj")})
    plan = make_plan(made, two(config(softmax=fp8(), cache=fp8(), post_rope=None)), NAMES)
    assert [a.key_layer for a in plan.attentions] == [f"layers.{i}.self_attn.k_proj" for i in range(2)]
    assert plan.warnings == ()


def test_without_a_cache_nothing_is_said_of_it() -> None:
    made = make_plan(reachable(), config(post_rope=None), NAMES)
    assert made.config.kv_cache_post_rope is False
    assert (made.attentions, made.warnings) == ((), ())


def test_where_attention_cannot_be_reached_outputs_are_rounded_and_the_reason_is_told() -> None:
    made = make_plan(model(), two(config(cache=fp8(), post_rope=None)), NAMES)
    assert (made.config.kv_cache_post_rope, made.attentions) == (False, ())
    (warning,) = made.warnings
    assert "4 layers feed the quantized cache" in warning
    assert "only the attention of transformers models" in warning
    assert any("warning: 4 layers feed" in line for line in plan_lines(made))
    assert made.to_dict()["warnings"] == [warning]


@pytest.mark.parametrize("norm", ["k_norm", "key_layernorm", "qk_norm"])
def test_keys_behind_a_norm_that_cannot_be_reached_are_refused_unless_it_is_asked_for(norm: str) -> None:
    made = model()
    for block in made["layers"]:  # type: ignore[index]
        block["self_attn"][norm] = nn.Identity()
    with pytest.raises(ConfigError, match=rf"the norm 'layers\.0\.self_attn\.{norm}' changes keys.*kv_cache_post_rope=False"):
        make_plan(made, two(config(cache=fp8(), post_rope=None)), NAMES)
    for asked_of in (made, reachable(norm=norm)):
        (warning,) = make_plan(asked_of, two(config(cache=fp8(), post_rope=False)), NAMES).warnings
        assert f"self_attn.{norm}" in warning
    assert make_plan(reachable(norm=norm), two(config(cache=fp8(), post_rope=None)), NAMES).warnings == ()


def test_norms_on_queries_or_values_alone_are_none_on_keys() -> None:
    for norm in ("q_norm", "value_norm", "k_scale"):
        assert make_plan(reachable(norm=norm), two(config(cache=fp8(), post_rope=False)), NAMES).warnings == ()


@pytest.mark.parametrize(("asked", "expected"), [(None, True), (True, True), (False, False)])
def test_queries_of_quantized_attention_are_rounded_as_attention_gets_them_unless_it_is_asked_otherwise(
    asked: bool | None, expected: bool
) -> None:
    made = config(softmax=fp8())
    made.layer_quant_config = {"*q_proj": QLayerConfig(weight=fp8(), output_tensors=fp8())}
    made.attention_post_rope = asked
    plan = make_plan(reachable(), made, NAMES)
    assert plan.config.attention_post_rope is expected
    assert [a.query_layer for a in plan.attentions] == [f"layers.{i}.self_attn.q_proj" if expected else None for i in range(2)]


def test_projections_are_those_that_the_architecture_states_whatever_they_are_called() -> None:
    facts = attrs.evolve(NAMES, query_projections="self_attn.ask", key_projections="self_attn.left", value_projections="self_attn.right")
    facts = attrs.evolve(facts, kv_layers_name=("*left", "*right"), q_layer_name="*ask")
    cache = {name: QLayerConfig(output_tensors=fp8()) for name in facts.kv_layers_name or ()}
    asked = attrs.evolve(config(cache=fp8(), post_rope=True), kv_cache_quant_config=cache)
    attentions = make_plan(model(("ask", "left", "right")), asked, facts).attentions
    assert [(a.key_layer, a.value_layer) for a in attentions] == [
        (f"layers.{i}.self_attn.left", f"layers.{i}.self_attn.right") for i in range(2)
    ]


def test_a_norm_of_keys_is_the_one_that_the_architecture_states() -> None:
    warned = make_plan(reachable(norm="k_norm"), config(cache=fp8()), attrs.evolve(NAMES, key_norms="self_attn.k_norm")).warnings
    silent = make_plan(reachable(norm="k_norm"), config(cache=fp8()), attrs.evolve(NAMES, key_norms=())).warnings
    assert any("Runtimes cache keys after the norm 'layers.0.self_attn.k_norm'" in line for line in warned)
    assert not any("after the norm" in line for line in silent)
