"""The training loop, its step, its validations and its profile."""

from toolkit.train.loop.training_loop import training_steps

__all__ = ["training_steps"]
