"""The exporter ``gguf``, which writes GGUF files for llama.cpp and for programs built on llama.cpp."""
