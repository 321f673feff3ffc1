"""The exporter of GGUF files, for llama.cpp and programs that use it."""
