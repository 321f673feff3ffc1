"""The exporter ``gguf``, which writes GGUF files for llama.cpp and for programs that are built on llama.cpp."""
