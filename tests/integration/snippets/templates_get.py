from quark.torch import LLMTemplate

# List available templates
templates = LLMTemplate.list_available()
print(templates)  # ['llama', 'opt', 'qwen', 'mistral', ...]

# Get a specific template
llama_template = LLMTemplate.get("llama")

# Create a basic configuration
config = llama_template.get_config(scheme="fp8", kv_cache_scheme="fp8")
