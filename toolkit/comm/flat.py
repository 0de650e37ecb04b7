"""All-reduce by the backend's own algorithm."""

from __future__ import annotations

import torch

from toolkit.comm.peers import Peers
from toolkit.comm.reductions import backend_all_reduce


def flat_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """gloo's ring, or what NCCL chooses by size and hardware.

    All ranks of the group take part, since a backend knows no part of a group.
    """
    backend_all_reduce(data, op, peers.group)
