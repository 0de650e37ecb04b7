"""The state that a checkpoint of a training contains, and when it is saved."""

from toolkit.train.state.training_state import TrainingState

__all__ = ["TrainingState"]
