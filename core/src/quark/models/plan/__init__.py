"""A model's structure: its decoder blocks, its attention, and the plan of its layers."""
