"""Code that finds the structure of a model (decoder blocks, attention and layers), and plans how it is
quantized."""
