"""Configuration, torch-free: how a tensor, a layer and a model are quantized, and the facts about a model family."""
