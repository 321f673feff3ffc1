"""Vector quantization at 2 and 3 bits: one code for four neighbouring weights, in a learned codebook."""
