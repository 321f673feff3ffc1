"""acme-quant: a number format, an observer, a scheme and an algorithm for quark, in one distribution."""
