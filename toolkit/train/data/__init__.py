"""Training data: sample sources, the order of samples, the loader, and token files packed in advance.

The names of this package are imported on first use, so that packing text and indexing lines work without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.train.data.broken import BrokenRecordError
    from toolkit.train.data.hdf5_datasets import HDF5Source
    from toolkit.train.data.iterable_dataset import IterableSource
    from toolkit.train.data.json_lines import JsonLinesSource
    from toolkit.train.data.loader import Loader
    from toolkit.train.data.loader_settings import LoaderSettings, choose_loader_settings
    from toolkit.train.data.map_dataset import MapSource
    from toolkit.train.data.padding import Padded, PadSamples, pad_to_multiple
    from toolkit.train.data.source import PartOfSource, hold_out
    from toolkit.train.data.token_windows import TokenSource

__all__ = [
    "BrokenRecordError", "HDF5Source", "IterableSource", "JsonLinesSource", "Loader", "LoaderSettings", "MapSource",
    "PadSamples", "Padded", "PartOfSource", "TokenSource", "choose_loader_settings", "hold_out", "pad_to_multiple",
]  # fmt: skip
_MODULES = {
    "BrokenRecordError": "broken",
    "HDF5Source": "hdf5_datasets",
    "IterableSource": "iterable_dataset",
    "JsonLinesSource": "json_lines",
    "Loader": "loader",
    "LoaderSettings": "loader_settings",
    "MapSource": "map_dataset",
    "PadSamples": "padding",
    "Padded": "padding",
    "PartOfSource": "source",
    "TokenSource": "token_windows",
    "choose_loader_settings": "loader_settings",
    "hold_out": "source",
    "pad_to_multiple": "padding",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
