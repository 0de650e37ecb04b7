"""The training state in checkpoints, and when a run saves it."""

from toolkit.train.state.training_state import TrainingState

__all__ = ["TrainingState"]
