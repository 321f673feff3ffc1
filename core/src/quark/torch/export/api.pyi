# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import ModelExporter as ModelExporter
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark.checkpoint import map_to_quark
from quark.torch.not_offered import move_quantizer_to_dict
from quark.torch.parameters import export_gguf as export_gguf
from quark.torch.parameters import export_onnx as export_onnx
from quark.torch.parameters import save_params as save_params
_map_to_quark = map_to_quark
_move_quantizer_to_dict = move_quantizer_to_dict
