"""GGUF files, which llama.cpp and programs that are built on it run."""
