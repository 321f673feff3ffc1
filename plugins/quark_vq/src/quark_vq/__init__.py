"""Vector quantization at 2 and 3 bits: a code of a learned codebook stands for four or two neighbours."""
