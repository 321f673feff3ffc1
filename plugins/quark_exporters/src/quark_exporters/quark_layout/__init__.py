"""The exporter ``safetensors``: the Quark checkpoint layout."""
