"""Package of AMD Quark's public configuration modules: `config`, `type`, `template`, `algo_configs`."""
