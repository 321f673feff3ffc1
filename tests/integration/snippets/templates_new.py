from quark.torch import LLMTemplate

# Create a new template
template = LLMTemplate(
  model_type="kimi_k2",
  kv_layer_name=["*kv_b_proj"],
  exclude_layers=["lm_head"]
)

# Register the template to LLMTemplate class (optional, if you want to use the template in other places)
LLMTemplate.register_template(template)

# Get the template
template = LLMTemplate.get("kimi_k2")

# Create a configuration
config = template.get_config(
    scheme="fp8",
    kv_cache_scheme="fp8"
)
