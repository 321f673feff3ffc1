"""Commands that work on models and checkpoints; evaluation, reports and mixed precision, which look at runs from above."""
