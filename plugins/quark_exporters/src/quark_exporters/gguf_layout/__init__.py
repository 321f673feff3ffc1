"""GGUF files for llama.cpp and programs built on it."""
