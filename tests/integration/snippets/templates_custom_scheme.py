from quark.torch.quantization.config.config import Int8PerTensorSpec, QuantizationConfig
from quark.torch import LLMTemplate

# Create custom quantization specification
quant_spec = Int8PerTensorSpec(
    observer_method="min_max",
    symmetric=True,
    scale_type="float",
    round_method="half_even",
    is_dynamic=False
).to_quantization_spec()

# Create and register custom scheme
global_config = QuantizationConfig(weight=quant_spec)
LLMTemplate.register_scheme("custom_int8_wo", config=global_config)

# Get a specific template
llama_template = LLMTemplate.get("llama")

# Use custom scheme
config = llama_template.get_config(scheme="custom_int8_wo")
