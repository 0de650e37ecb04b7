"""A reader of checkpoints, written from docs/checkpoint-format.md and from nothing else."""

import json
import zlib
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import xxhash

TYPES = {"bfloat16": "<u2", "bool": "?", "complex32": "<u4", "complex64": "<c8", "complex128": "<c16"}


class Checkpoint:
    def __init__(self, folder):
        text = Path(folder, "manifest.json").read_bytes()
        self.folder, self.manifest = folder, json.loads(text)
        head, digest, tail = text.rpartition(self.manifest["digest"].encode())
        check(xxhash.xxh3_128_hexdigest(head + b"0" * 32 + tail).encode() == digest, "manifest.json")
        check(self.manifest["format"] == "toolkit-checkpoint" and self.manifest["schema"] in (1, 2, 3), "schema")

    @cache  # noqa: B019
    def shard(self, number):
        record = self.manifest["files"][number]
        data = Path(self.folder, record["name"]).read_bytes()
        digests = b"".join(xxhash.xxh3_128_digest(data[at : at + 2**22]) for at in range(0, len(data), 2**22))
        check((len(data), xxhash.xxh3_128_hexdigest(digests)) == (record["size"], record["digest"]), record["name"])
        return data

    def tensor(self, key):
        record = self.manifest["tensors"][key]
        kind = "u1" if "float8" in record["dtype"] else TYPES.get(record["dtype"], record["dtype"])
        whole = np.empty(record["shape"], np.dtype(kind).newbyteorder("<"))
        for number, offset, shape, first, *chunked in record["pieces"]:
            data, ends = self.shard(number), map(sum, zip(offset, shape, strict=True))
            piece = whole[(*map(slice, offset, ends), ...)]
            if not chunked:
                piece[...] = np.frombuffer(data, whole.dtype, int(np.prod(shape)), first).reshape(shape)
            for cut, places in chunked:  # one, where the piece is compressed: with shuffle and deflate
                grid = product(*(range(0, size, part) for size, part in zip(shape, cut, strict=True)))
                for start, (first, size) in zip(grid, places, strict=True):
                    shuffled = np.frombuffer(zlib.decompress(data[first : first + size]), "u1")
                    chunk = shuffled.reshape(whole.itemsize, -1).T.copy().view(whole.dtype).reshape(cut)
                    box = piece[tuple(slice(at, at + part) for at, part in zip(start, cut, strict=True))]
                    box[...] = chunk[tuple(map(slice, box.shape))]
        return whole


def plain(value):
    if not isinstance(value, dict):
        return [plain(item) for item in value] if isinstance(value, list) else value
    if "$float" in value or "$tuple" in value:
        return float(value["$float"]) if "$float" in value else tuple(map(plain, value["$tuple"]))
    return {plain(key): plain(item) for key, item in value.get("$dict", value.items())}


def check(good, what):
    if not good:
        raise ValueError(f"{what} is damaged, or not of this format")
