"""Configuration of tensors, layers and models, and facts about model families. Imports no torch."""
