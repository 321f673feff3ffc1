"""Configurations of tensors, layers and models, and facts about model families. They import no torch."""
