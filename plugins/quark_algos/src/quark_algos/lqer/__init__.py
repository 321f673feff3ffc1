"""LQER: a low-rank product beside each layer, which adds the rounding error."""
