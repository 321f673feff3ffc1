"""LQER: a low-rank product beside each layer, which adds what rounding lost."""
