"""Templates with one thing wrong each, of a family whose models are Llama's under another name."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quark.base.lazy import ObjectRef
from quark.config.architecture import Architecture
from quark.plugins import TemplateRecord
from quark_templates.llama import LLAMA

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS", "WITHOUT_VALUES"]

FAMILY = "mutant_family"


class MutantConfig(LlamaConfig):
    model_type = FAMILY


class MutantForCausalLM(LlamaForCausalLM):
    config_class = MutantConfig


def tiny_model(model_type: str) -> nn.Module:
    """The example of every template here."""
    AutoConfig.register(FAMILY, MutantConfig, exist_ok=True)
    AutoModelForCausalLM.register(MutantConfig, MutantForCausalLM, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MutantForCausalLM(MutantConfig(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + float(parameter.ndim == 1))
    return model


def without_head(model_type: str) -> nn.Module:
    """An example whose second block is never called."""
    model: Any = tiny_model(model_type)
    second = model.model.layers[1]
    second.forward = lambda hidden_states, *args, **kwargs: hidden_states * torch.nan
    return model  # type: ignore[no-any-return]


def other_family(model_type: str) -> nn.Module:
    model: Any = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    )
    return model.eval()  # type: ignore[no-any-return]


def record_of(example: Any = tiny_model, **facts: Any) -> TemplateRecord:
    architecture: Architecture = attrs.evolve(LLAMA, **{"model_type": FAMILY, **facts})
    return TemplateRecord(name=FAMILY, architecture=ObjectRef(architecture), example=ObjectRef(example))


HEALTHY = (record_of(),)
WITHOUT_VALUES = (record_of(attention_value=None, mlp_value=None),)


def _mutant(check: str, about: str, example: Any = tiny_model, **facts: Any) -> Mutant:
    return Mutant(f"template:{check}", about, (record_of(example, **facts),))


MUTANTS = (
    Mutant(
        "template:can_be_checked",
        "has no example, of a family that transformers does not know",
        (attrs.evolve(record_of(model_type="an_unknown_family"), name="an_unknown_family", example=None),),
    ),
    _mutant("is_named_as_its_model_type", "states facts of another type", model_type="other_family"),
    _mutant("is_named_as_its_model_type", "has an example of another family", other_family),
    _mutant("names_the_decoder_blocks", "names a list that is not there", decoder_blocks="model.blocks"),
    _mutant("names_the_decoder_blocks", "names the modules of one block", decoder_blocks="model.layers.0"),
    _mutant("names_embeddings_and_head", "names the head as the embeddings", embeddings="lm_head"),
    _mutant("names_embeddings_and_head", "names a head that is not there", head="output"),
    _mutant("names_modules_that_there_are", "names a projection that is not there", mlp_output="mlp.out_proj"),
    _mutant("names_modules_that_there_are", "names a final norm that is not there", final_norm="model.last_norm"),
    _mutant("names_every_projection", "forgets the input group of the MLP", mlp_inputs=(), mlp_value=None),
    _mutant("patterns_match_layers", "has a pattern of the cache that matches nothing", kv_layers_name=("*key_proj", "*v_proj")),
    _mutant("patterns_match_layers", "has a pattern of queries that matches nothing", q_layer_name="*wq"),
    _mutant("caches_no_queries", "takes queries for keys", kv_layers_name=("*q_proj",)),
    _mutant("excludes_head_and_routers", "misspells the head among what it excludes", exclude_layers_name=("lm_haed",)),
    _mutant(
        "input_groups_read_one_tensor",
        "takes the output projection for an input",
        attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ),
    _mutant("norms_feed_what_is_said", "exchanges the norms", attention_norm="post_attention_layernorm", mlp_norm="input_layernorm"),
    _mutant("norms_feed_what_is_said", "forgets a reader of a norm", attention_inputs=("self_attn.q_proj", "self_attn.k_proj")),
    _mutant("norms_feed_what_is_said", "says that norms have an offset", norm_has_unit_offset=True),
    _mutant("norms_feed_what_is_said", "says that norms have no weight", norm_has_weight=False),
    _mutant("values_pass_linearly", "takes keys for values", attention_value="self_attn.k_proj"),
    _mutant("values_pass_linearly", "takes the gate for the value", mlp_value="mlp.gate_proj"),
    _mutant("values_pass_linearly", "says that values are the last rows", mlp_value_rows="last", mlp_value="mlp.gate_proj"),
    _mutant("every_algorithm_fits_or_says_why_not", "refuses an algorithm without a reason", unsupported={"awq": " "}),
    _mutant("every_algorithm_fits_or_says_why_not", "names layers that are not there", mlp_output="mlp.out_proj"),
    _mutant("every_algorithm_runs", "has an example that gives NaN", without_head),
    _mutant("quantizes_and_reloads", "excludes every layer", exclude_layers_name=("*",)),
    _mutant("quantizes_and_reloads", "has an example that gives NaN", without_head),
)
