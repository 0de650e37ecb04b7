"""The training loop: optimizer steps, validations and the step profile."""

from toolkit.train.loop.training_loop import training_steps

__all__ = ["training_steps"]
