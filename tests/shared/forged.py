"""Checkpoints changed on purpose, with digests that fit what they hold now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint.format.digests import digests_of_file
from toolkit.checkpoint.format.layout import MANIFEST, digest_name
from toolkit.checkpoint.format.manifest import FileRecord, Manifest
from toolkit.checkpoint.format.manifest_file import manifest_text, read_manifest

SHARD = "shard-00000-of-00001.h5"


def put(body: dict[str, Any], path: str, value: object) -> None:
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    for part in parents:
        body = body[part]
    body[last] = value


def signed(body: dict[str, Any]) -> str:
    """As docs/checkpoint-format.md says: the digest of the text in which its own digits are zeros."""
    text = json.dumps({**body, "digest": "0" * 32})
    head, tail = text.rsplit("0" * 32, 1)
    return head + xxhash.xxh3_128_hexdigest(text.encode()) + tail


def sign(folder: Path, manifest: Manifest) -> None:
    """Make digests and manifest fit what the shard file holds now."""
    digests = digests_of_file(folder / SHARD)
    (folder / digest_name(SHARD)).write_text(digests.text())
    own = digests_of_file(folder / digest_name(SHARD))
    files = (FileRecord(digest_name(SHARD), own.size, own.whole), FileRecord(SHARD, digests.size, digests.whole))
    (folder / MANIFEST).write_text(manifest_text(replace(manifest, files=files)))
    read_manifest(folder)
