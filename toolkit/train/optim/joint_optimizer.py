"""Several optimizers of one model that look like one: to a loop, a gradient scaler and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from toolkit.errors import ToolkitError


class JointOptimizer(torch.optim.Optimizer):
    """Takes the steps of all its `members`, which have no parameter in common.

    The groups of `param_groups` are the members' own dicts, and all of them keep what they know of a parameter in this
    one's `state`: who sets a rate, fills a state or clears it here does so there.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        named = [parameter for group in groups for parameter in group["params"]]
        if len(set(named)) != len(named):
            raise ToolkitError(
                "a parameter is given to two of the optimizers", where="optimizer", fix="give each parameter to one"
            )
        self.members = tuple(members)
        super().__init__([{"params": named}], {})
        self.param_groups = groups
        for member in members:
            self.state.update(member.state)
            member.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each member."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "param_groups") and self.param_groups:
            raise ToolkitError(
                "a joint optimizer takes no further parameters",
                where="optimizer",
                fix="give them to one of its members before they are joined",
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch's `load_state_dict` ends here, with new dicts: the members take them, too."""
        super().__setstate__(state)
        first = 0
        for member in self.members:
            after = first + len(member.param_groups)
            member.__setstate__({"state": self.state, "param_groups": self.param_groups[first:after]})
            first = after
