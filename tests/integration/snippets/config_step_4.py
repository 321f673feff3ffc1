# Example 1: W_INT8_A_INT8_PER_TENSOR
quant_config = Config(global_quant_config=W_INT8_A_INT8_PER_TENSOR_CONFIG)

# Example 2: W_UINT4_PER_GROUP with advanced algorithm
quant_config = Config(global_quant_config=W_UINT4_PER_GROUP_CONFIG, algo_config=ALGORITHM_CONFIG)
EXCLUDE_LAYERS = ["lm_head"] # For language models
quant_config = replace(quant_config, exclude=EXCLUDE_LAYERS)

# Example 3: W_FP8_A_FP8_PER_TENSOR with KV_CACHE_FP8
quant_config = Config(global_quant_config=W_FP8_A_FP8_PER_TENSOR_CONFIG)
KV_CACHE_CFG = {
            "*.v_proj":
            QuantizationConfig(input_tensors=quant_config.global_quant_config.input_tensors,
                               weight=quant_config.global_quant_config.weight,
                               output_tensors=FP8_PER_TENSOR_SPEC),
            "*.k_proj":
            QuantizationConfig(input_tensors=quant_config.global_quant_config.input_tensors,
                               weight=quant_config.global_quant_config.weight,
                               output_tensors=FP8_PER_TENSOR_SPEC),
        }
quant_config = replace(quant_config, layer_quant_config=KV_CACHE_CFG)
