"""Element types of tensors: in torch, in memory as numpy, and in the HDF5 file.

bfloat16 is an HDF5 float with 8 exponent and 7 mantissa bits. The 8-bit floats are stored as unsigned bytes with an
attribute that names the type: HDF5 does not support floats without infinities, and would read 256 as inf.
"""

from dataclasses import dataclass

import numpy as np
from h5py import h5t

from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Element:
    """One element type: torch's name without "torch.", and the numpy type `memory` with the same bits.

    `missing` is the value that the index returns if a shard file is missing: NaN if the type has one, else zero.
    """

    name: str
    memory: np.dtype
    missing: float | complex | int

    @property
    def size_bytes(self) -> int:
        """The size of one element in bytes."""
        return self.memory.itemsize

    def file_type(self) -> h5t.TypeID:
        """Return the HDF5 type. It has the same bits as `memory`, so that HDF5 never converts elements."""
        if self.name == "bfloat16":
            return _bfloat16()
        return h5t.py_create(self.memory, logical=True)


def _bfloat16() -> h5t.TypeID:
    """Return bfloat16 as an HDF5 float: sign bit 15, exponent bits 7..14, mantissa bits 0..6, bias 127."""
    kind = h5t.IEEE_F32LE.copy()
    # The fields are set first, because HDF5 rejects a precision that would cut off fields.
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_precision(16)
    kind.set_offset(0)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


_NAN = float("nan")
_HALF_PAIR = np.dtype([("r", "<f2"), ("i", "<f2")])
_TABLE = [
    *(Element(f"float{bits}", np.dtype(f"<f{bits // 8}"), _NAN) for bits in (16, 32, 64)),
    Element("bfloat16", np.dtype("<u2"), _NAN),
    Element("float8_e4m3fn", np.dtype("u1"), 0x7F),
    Element("float8_e5m2", np.dtype("u1"), 0x7F),
    Element("float8_e4m3fnuz", np.dtype("u1"), 0x80),
    Element("float8_e5m2fnuz", np.dtype("u1"), 0x80),
    Element("float8_e8m0fnu", np.dtype("u1"), 0xFF),
    *(Element(f"int{bits}", np.dtype(f"<i{bits // 8}"), 0) for bits in (8, 16, 32, 64)),
    *(Element(f"uint{bits}", np.dtype(f"<u{bits // 8}"), 0) for bits in (8, 16, 32, 64)),
    Element("bool", np.dtype("?"), 0),
    Element("complex32", _HALF_PAIR, 0),
    Element("complex64", np.dtype("<c8"), complex(_NAN, _NAN)),
    Element("complex128", np.dtype("<c16"), complex(_NAN, _NAN)),
]
ELEMENTS: dict[str, Element] = {element.name: element for element in _TABLE}


def element(name: str, *, where: str = "") -> Element:
    """Return the element type named, for example, "bfloat16". Raises ToolkitError for an unsupported type."""
    if name not in ELEMENTS:
        known = ", ".join(ELEMENTS)
        raise ToolkitError(
            f"element type {name} cannot be stored in a checkpoint",
            where=where,
            fix=f"convert the tensor to one of: {known}",
        )
    return ELEMENTS[name]
