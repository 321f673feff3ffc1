"""Documented package of the module `observer`."""
