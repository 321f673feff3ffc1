"""Documented package of the configuration modules: `config`, `type`, `template`, `algo_configs`."""
