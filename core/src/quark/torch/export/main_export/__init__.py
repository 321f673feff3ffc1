"""Package of AMD Quark's public module `quant_config_parser`."""
