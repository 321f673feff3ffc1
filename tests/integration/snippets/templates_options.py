from quark.torch import LLMTemplate

# Get a specific template
llama_template = LLMTemplate.get("llama")

# Create configuration with multiple options
config = llama_template.get_config(
    scheme="int4_wo_128",          # Global quantization scheme
    algorithm="awq",               # Quantization algorithm
    kv_cache_scheme="fp8",         # KV cache quantization
    min_kv_scale=1.0,              # Minimum value of KV Cache scale
    attention_scheme="fp8",        # Attention quantization
    layer_config={                 # Layer-specific configurations
        "*.mlp.gate_proj": "mxfp4",
        "*.mlp.up_proj": "mxfp4",
        "*.mlp.down_proj": "mxfp4"
    },
    layer_type_config={            # Layer type configurations
        nn.LayerNorm: "fp8"
    },
    exclude_layers=["lm_head"]      # Exclude layers from quantization
)
