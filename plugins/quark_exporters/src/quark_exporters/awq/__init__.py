"""The exporter ``awq``: 4-bit weights as AutoAWQ stores them."""
