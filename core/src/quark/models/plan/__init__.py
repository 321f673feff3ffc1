"""A model's structure: which layer gets what and why, the plan, and where its decoder blocks are."""
