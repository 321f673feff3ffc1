# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark.checkpoint import map_to_quark
from quark_amd.model_exporter import ModelExporter as ModelExporter
from quark_amd.model_exporter import export_gguf as export_gguf
from quark_amd.model_exporter import export_onnx as export_onnx
from quark_amd.not_offered import move_quantizer_to_dict
from quark_amd.parameters import save_params as save_params
_map_to_quark = map_to_quark
_move_quantizer_to_dict = move_quantizer_to_dict
