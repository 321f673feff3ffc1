"""The commands of this distribution: ``quark check`` and ``quark new-plugin``."""
