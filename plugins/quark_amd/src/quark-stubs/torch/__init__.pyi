# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark.config.enums import QuantFlow as QuantFlow
from quark.config.templates import LLMTemplate as LLMTemplate
from quark.runs import ModelQuantizer as ModelQuantizer
from quark_amd.model_exporter import ModelExporter as ModelExporter
from quark_amd.model_exporter import export_gguf as export_gguf
from quark_amd.model_exporter import export_onnx as export_onnx
from quark_amd.not_offered import RuntimeOptions as RuntimeOptions
from quark_amd.not_offered import disable_native_inference as disable_native_inference
from quark_amd.not_offered import enable_native_inference as enable_native_inference
from quark_amd.parameters import load_params as load_params
from quark_amd.parameters import save_params as save_params
