from quark.torch.algorithm.awq.awq import AwqProcessor
from quark.torch.algorithm.awq.smooth import SmoothQuantProcessor
from quark.torch.algorithm.gptq.gptq import GptqProcessor
from quark.torch.quantization.config.config import AWQConfig, SmoothQuantConfig, GPTQConfig

ALGORITHM_CONFIG=AWQConfig(
  scaling_layers=[
    {'prev_op': 'input_layernorm', 'layers': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'], 'inp': 'self_attn.q_proj', 'module2inspect': 'self_attn', 'has_kwargs': True, 'help': 'attention input'},
    {'prev_op': 'self_attn.v_proj', 'layers': ['self_attn.o_proj'], 'inp': 'self_attn.o_proj', 'module2inspect': None, 'has_kwargs': False, 'condition': 'module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape'},
    {'prev_op': 'post_attention_layernorm', 'layers': ['mlp.gate_proj', 'mlp.up_proj'], 'inp': 'mlp.gate_proj', 'module2inspect': 'mlp', 'has_kwargs': False, 'help': 'linear 1'},
    {'prev_op': 'mlp.up_proj', 'layers': ['mlp.down_proj'], 'inp': 'mlp.down_proj', 'module2inspect': None, 'has_kwargs': False, 'help': 'linear 2'}],
  model_decoder_layers='model.layers',
  embedding_layers=['model.embed_tokens'])

ALGORITHM_CONFIG=SmoothQuantConfig(
  alpha=0.5,
  scale_clamp_min=0.001,
  scaling_layers=[
    {'prev_op': 'input_layernorm', 'layers': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'], 'inp': 'self_attn.q_proj', 'module2inspect': 'self_attn', 'has_kwargs': True, 'help': 'attention input'},
    {'prev_op': 'self_attn.v_proj', 'layers': ['self_attn.o_proj'], 'inp': 'self_attn.o_proj', 'module2inspect': None, 'has_kwargs': False, 'condition': 'module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape'},
    {'prev_op': 'post_attention_layernorm', 'layers': ['mlp.gate_proj', 'mlp.up_proj'], 'inp': 'mlp.gate_proj', 'module2inspect': 'mlp', 'has_kwargs': False, 'help': 'linear 1'},
    {'prev_op': 'mlp.up_proj', 'layers': ['mlp.down_proj'], 'inp': 'mlp.down_proj', 'module2inspect': None, 'has_kwargs': False, 'help': 'linear 2'}],
  embedding_layers=['model.embed_tokens'],
  model_decoder_layers='model.layers')


ALGORITHM_CONFIG=GPTQConfig(
  damp_percent=0.01,
  desc_act=True,
  static_groups=True,
  true_sequential=True,
  inside_layer_modules=['self_attn.k_proj', 'self_attn.v_proj', 'self_attn.q_proj', 'self_attn.o_proj', 'mlp.up_proj', 'mlp.gate_proj', 'mlp.down_proj'],
  model_decoder_layers='model.layers',
  embedding_layers=['model.embed_tokens'])
