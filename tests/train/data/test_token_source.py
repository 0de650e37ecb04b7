from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
import xxhash

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.train.data import TokenSource
from toolkit.train.data.token_file import HEADER_BYTES, TokenHeader, map_tokens, read_header


def token_file(path, tokens, dtype="uint16"):
    data = np.array(tokens, np.dtype(dtype)).tobytes()
    path.write_bytes(TokenHeader(dtype, 300, len(tokens), 1, xxhash.xxh3_128_digest(data)).to_bytes() + data)
    return path


def test_the_header_is_what_its_page_says(tmp_path):
    data = token_file(tmp_path / "a.tokens", [1, 2, 300]).read_bytes()
    magic, width, vocabulary, tokens, texts, digest, rest = struct.unpack("<8sIIQQ16s16s", data[:HEADER_BYTES])
    assert (magic, width, vocabulary, tokens, texts, rest) == (b"TKTOKEN1", 2, 300, 3, 1, bytes(16))
    assert digest == xxhash.xxh3_128_digest(data[64:]) and data[64:] == struct.pack("<3H", 1, 2, 300)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_of_several_files_with_targets_one_token_on(tmp_path, dtype):
    files = [token_file(tmp_path / "a", range(10), dtype), token_file(tmp_path / "b", range(100, 104), dtype)]
    source = TokenSource(files, 3)
    assert source.count == 4
    inputs, targets = source.finished(source.take(np.array([3, 0, 2, 3])))
    assert inputs.tolist() == [[100, 101, 102], [0, 1, 2], [6, 7, 8], [100, 101, 102]]
    assert targets.tolist() == [[101, 102, 103], [1, 2, 3], [7, 8, 9], [101, 102, 103]]
    assert inputs.dtype == targets.dtype and str(inputs.dtype) == "torch.int64"


def test_large_tokens_are_not_cut(tmp_path):
    large = token_file(tmp_path / "a", [2**32 - 1, 65535, 7], "uint32")
    source = TokenSource([token_file(tmp_path / "b", [1, 2, 3]), large], 2)
    inputs, _ = source.finished(source.take(np.array([1, 0])))
    assert inputs.tolist() == [[2**32 - 1, 65535], [1, 2]], "of files of two types, too"


def test_a_raw_file_needs_its_type(tmp_path):
    path = tmp_path / "raw.bin"
    np.arange(7, dtype=np.uint32).tofile(path)
    assert TokenSource([path], 3, dtype="uint32").count == 2
    with pytest.raises(ToolkitError, match=r"the file does not start with a token file header. Fix: pass dtype="):
        TokenSource([path], 3)
    with pytest.raises(ToolkitError, match="unsupported token type 'int64'"):
        TokenSource([path], 3, dtype="int64")
    path.write_bytes(b"odd")
    with pytest.raises(ToolkitError, match="expected a whole number of uint16 tokens, got 3 bytes"):
        TokenSource([path], 3, dtype="uint16")


def test_damaged_files_are_named(tmp_path):
    path = token_file(tmp_path / "a.tokens", range(10))
    whole = path.read_bytes()
    damages = {
        "expected 84 bytes for 10 tokens, got 83": whole[:-1],
        "the header is truncated": whole[:20],
        "has another version": b"TKTOKEN2" + whole[8:],
        "expected 2 or 4 bytes per token in the header, got 3": whole[:8] + b"\x03" + whole[9:],
    }
    for said, data in damages.items():
        path.write_bytes(data)
        with pytest.raises(ToolkitError, match=said) as told:
            read_header(path)
        assert told.value.where == str(path) and "toolkit data pack" in told.value.fix
    with pytest.raises(
        NotFoundError, match=r"file not found. Fix: pass a token file, or create one: toolkit data pack"
    ):
        read_header(tmp_path / "none")
    with pytest.raises(ToolkitError, match="expected uint32 tokens, got uint16"):
        map_tokens(token_file(path, range(10)), "uint32")


def test_files_without_a_window_are_refused(tmp_path):
    with pytest.raises(ToolkitError, match="none of 1 files has 11 tokens, which a window and its last target require"):
        TokenSource([token_file(tmp_path / "a", range(10))], 10)
    with pytest.raises(ToolkitError, match="none of 1 files has 2 tokens"):
        TokenSource([token_file(tmp_path / "b", [])], 1)


def test_the_digest_is_that_of_the_tokens(tmp_path):
    one = TokenSource([token_file(tmp_path / "a", range(10))], 3).digest
    assert one == xxhash.xxh3_128_hexdigest(np.arange(10, dtype=np.uint16).tobytes())
    assert one != TokenSource([token_file(tmp_path / "b", range(1, 11))], 3).digest


def test_it_travels_to_another_process_without_its_tokens(tmp_path):
    source = TokenSource([token_file(tmp_path / "a", range(10_000))], 3)
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    assert pickle.loads(sent).take(np.array([5])).tolist() == [[15, 16, 17, 18]]
