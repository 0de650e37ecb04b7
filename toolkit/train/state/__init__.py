"""The training state in a checkpoint, and when it is saved."""

from toolkit.train.state.training_state import TrainingState

__all__ = ["TrainingState"]
