"""AMD Quark's public API: the import paths of AMD Quark, and the classes and functions that quark-core does
not have.
"""
