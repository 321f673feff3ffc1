# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.config.templates import LLMTemplate as LLMTemplate
from quark.config.templates import QuantizationScheme as QuantizationScheme
from quark.config.templates import QuantizationSchemeCollection as QuantizationSchemeCollection
from quark_amd.default_templates import ATTENTION_TOKENS
from quark_amd.default_templates import DEFAULT_TEMPLATES as DEFAULT_TEMPLATES
from quark_amd.default_templates import projection_base
from quark_amd.default_templates import template_from_dict
from typing import Any
from quark.torch._names_of_plugins import *
_ATTN_TOKENS = ATTENTION_TOKENS
_create_template_from_config = template_from_dict
_resolve_projection_base_spec = projection_base
def __getattr__(name: str) -> Any: ...  # names of other plugins
