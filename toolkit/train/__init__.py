"""The training loop and its parts: optimizers, precision, memory, data and checkpointed state."""

from toolkit.train import moved_modules

moved_modules.install()
