"""acme-quant: a number format, an observer and a scheme for quark, in a distribution of their own."""
