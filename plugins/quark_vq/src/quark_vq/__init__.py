"""Vector quantization of weights at 2 and 3 bits per element.

One code is the index of an entry in a learned codebook. It describes four neighbouring elements at 2 bits,
and two neighbouring elements at 3 bits.
"""
