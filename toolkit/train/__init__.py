"""The training loop, and what a training takes: optimizers, precision, memory, data, and the state that it saves."""

from toolkit.train import moved_modules

moved_modules.install()
