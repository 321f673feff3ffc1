"""Configurations of tensors, layers and models, and facts about model families. None of it imports torch."""
