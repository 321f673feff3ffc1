"""During calibration, no KV cache grows, neither the model's nor that of a part of the model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from quark.calibration.forwards import without_cache

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_decoder_with_a_config_of_its_own_fills_no_cache_either() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "decoder_input_ids": torch.ones(1, 4, dtype=torch.long)}
    before = [module.config.use_cache for module in (model, model.encoder, model.decoder)]
    assert model(**inputs).past_key_values is not None
    with without_cache(model):
        assert not model.training
        assert model(**inputs).past_key_values is None
    assert model.training
    assert [module.config.use_cache for module in (model, model.encoder, model.decoder)] == before


def test_the_cache_of_a_decoder_is_off_while_the_body_runs() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with without_cache(model):
        assert model(torch.ones(1, 4, dtype=torch.long)).past_key_values is None
    assert model(torch.ones(1, 4, dtype=torch.long)).past_key_values is not None
