"""The commands on models and checkpoints, with evaluation, reports and mixed precision."""
