"""The exporter ``safetensors``, which writes the Quark checkpoint layout."""
