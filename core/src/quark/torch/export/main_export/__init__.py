"""Documented package of the module `quant_config_parser`."""
