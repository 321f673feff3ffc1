"""Documented package of the module `config`."""
