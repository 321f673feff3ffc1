"""AMD Quark's example scripts as programs of this project: ``python -m quark.scripts.quantize_quark``."""
