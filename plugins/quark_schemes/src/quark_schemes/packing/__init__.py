"""How each family of formats is stored in a checkpoint: `quark.numbers.Packing` values."""
