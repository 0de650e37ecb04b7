"""Keep the documented module paths of earlier releases importable, with one warning per path."""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

__all__ = ["MOVED", "install"]

# Documented paths of release 0.1 and their current paths.
MOVED: Mapping[str, str] = MappingProxyType({
    "toolkit.train.adascale": "toolkit.train.optim.adascale",
    "toolkit.train.data.broken_share": "toolkit.train.data.broken",
    "toolkit.train.compiling": "toolkit.train.memory.compiling",
    "toolkit.train.optimizers": "toolkit.train.optim.optimizers",
    "toolkit.train.precision": "toolkit.train.optim.precision",
    "toolkit.train.rate_scaling": "toolkit.train.optim.rate_scaling",
    "toolkit.train.recompute": "toolkit.train.memory.recompute",
    "toolkit.train.saves": "toolkit.train.state.saves",
})  # fmt: skip


class _MovedModules:
    """Import finder and loader that binds an old path to the same module object, so classes are not duplicated."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        # Python shows a FutureWarning by default, even if an imported module causes it, but no DeprecationWarning.
        warnings.warn(f"{name} is now {MOVED[name]}", FutureWarning, stacklevel=2)
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # Python calls only these two methods

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install() -> None:
    """Let `import` find the modules of `MOVED` by their earlier paths."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
