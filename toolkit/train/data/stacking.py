"""Collate samples of one shape like torch's `default_collate`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from toolkit.train.data.travel import MOST_BYTES


def stack(samples: list[Any]) -> Any:
    """Stack tensors and arrays, convert numbers to tensors, recurse into tuples and dicts, keep strings as a list.

    In a worker, `default_collate` puts each tensor into shared memory, which pays off only for large ones.
    """
    first = samples[0]
    if type(first) is Tensor and first.numel() * first.element_size() * len(samples) <= MOST_BYTES:
        return torch.stack(samples)
    if type(first) is dict and all(type(one) is dict and one.keys() == first.keys() for one in samples):
        return {name: stack([one[name] for one in samples]) for name in first}
    if type(first) is tuple and all(type(one) is tuple and len(one) == len(first) for one in samples):
        return [stack(list(entries)) for entries in zip(*samples, strict=True)]
    return default_collate(samples)
