# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import ModelExporter as ModelExporter
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark.config.enums import QuantFlow as QuantFlow
from quark.config.templates import LLMTemplate as LLMTemplate
from quark.runs import ModelQuantizer as ModelQuantizer
from quark.torch.not_offered import RuntimeOptions as RuntimeOptions
from quark.torch.not_offered import disable_native_inference as disable_native_inference
from quark.torch.not_offered import enable_native_inference as enable_native_inference
from quark.torch.parameters import export_gguf as export_gguf
from quark.torch.parameters import export_onnx as export_onnx
from quark.torch.parameters import load_params as load_params
from quark.torch.parameters import save_params as save_params
