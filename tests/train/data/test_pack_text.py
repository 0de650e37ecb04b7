"""Text to tokens: the same bytes by any number of processes, whole or not there, mistakes named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.train.data import TokenSource
from toolkit.train.data.pieces import pieces_of
from toolkit.train.data.preprocess import Packing, pack
from toolkit.train.data.token_file import map_tokens, read_header

TEXTS = ("hello world\n" * 40, "", "no end of line", "grüße 😀\n" * 30)


@pytest.fixture
def files(tmp_path):
    found = []
    for number, text in enumerate(TEXTS):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        found.append(path)
    return found


def beside(output):
    return sorted(path.name for path in output.parent.iterdir() if not path.name.endswith(".txt"))


def test_bytes_are_tokens_and_each_file_may_have_an_end(files, tmp_path):
    output = tmp_path / "all.tokens"
    header = pack(files, output, Packing(end_token=256))
    expected = [token for text in TEXTS for token in (*text.encode(), 256)]
    assert map_tokens(output).tolist() == expected
    assert (header.tokens, header.texts, header.vocabulary, header.dtype) == (len(expected), 4, 257, "uint16")
    assert read_header(output) == header
    assert TokenSource([output], 8).count == (len(expected) - 1) // 8
    assert beside(output) == ["all.tokens"]


def test_the_bytes_are_the_same_by_any_number_of_processes(files, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for tokenizer in ("bytes", "tokens_of_words:lengths"):
        made = []
        for processes in (1, 2):
            output = tmp_path / f"{processes}.tokens"
            advanced = []
            packing = Packing(tokenizer, end_token=9)
            pack(files, output, packing, processes=processes, replace=True, advance=advanced.append, piece_bytes=100)
            made.append(output.read_bytes())
            assert sum(advanced) == sum(path.stat().st_size for path in files) and len(advanced) > 8
        assert made[0] == made[1]
    whole = [token for text in TEXTS for token in (*(len(word) for word in text.split()), 9)]
    assert map_tokens(output).tolist() == whole, "cuts stand between words"


@given(st.lists(st.text(alphabet="aé😀\n", max_size=60), min_size=1, max_size=3), st.integers(4, 40))
def test_pieces_join_to_the_files_and_cut_no_letter(tmp_path_factory, texts, piece_bytes):
    folder = tmp_path_factory.mktemp("pieces")
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / str(number))
        paths[-1].write_bytes(text.encode())
    pieces = list(pieces_of(paths, piece_bytes))
    for path, text in zip(paths, texts, strict=True):
        own = [piece for piece in pieces if piece.path == path]
        assert "".join(piece.read().decode() for piece in own) == text
        assert [piece.last for piece in own] == [False] * (len(own) - 1) + [True]
        assert all(piece.end - piece.begin <= 2 * piece_bytes for piece in own)


@pytest.mark.parametrize("processes", [1, 2])
def test_mistakes_of_a_tokenizer_name_the_file_and_leave_nothing(files, tmp_path, processes, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    output = tmp_path / "all.tokens"
    mistakes = {
        "large": r"0.txt \(bytes 0 to 480\): the token 70000 does not fit in uint16. Fix: pack with --dtype uint32",
        "failing": r"0.txt \(bytes 0 to 480\): the tokenizer failed: KeyError: 'no such word'",
    }
    if processes == 1:
        mistakes |= {"negative": "the token -1 does not fit", "nested": r"int64 of shape \(1, 2\)"}
    else:
        mistakes = {"failing": mistakes["failing"], "dying": r"a tokenizing process was killed"}
    for name, said in mistakes.items():
        with pytest.raises(ToolkitError, match=said):
            pack(files, output, Packing(f"tokens_of_words:{name}"), processes=processes)
        assert not beside(output)


def test_names_that_are_no_tokenizer_are_refused_before_anything_is_written(files, tmp_path):
    for name, said in {
        "words": 'expected "bytes" or "module:name"',
        "no_such_module:encode": "cannot load the tokenizer: ModuleNotFoundError",
        "tokens_of_words:none": "cannot load the tokenizer: AttributeError",
        "tokens_of_words:number": "expected a function",
    }.items():
        with pytest.raises(ToolkitError, match=said):
            pack(files, tmp_path / "all.tokens", Packing(name))
    assert not beside(tmp_path / "all.tokens")


def test_a_file_that_is_no_text_is_named_with_the_fix(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ToolkitError, match=r"a.txt .*: not UTF-8: .* at byte 3 .* Fix: convert the file"):
        pack([tmp_path / "a.txt"], tmp_path / "a.tokens", Packing("tokens_of_words:lengths"))


def test_an_older_file_stays_until_the_new_one_is_whole(files, tmp_path):
    output = tmp_path / "all.tokens"
    pack(files[:1], output)
    before = output.read_bytes()
    with pytest.raises(ToolkitError, match=r"the file already exists. Fix: pass --force"):
        pack(files, output)
    with pytest.raises(ToolkitError, match="the tokenizer failed"):
        pack(files, output, Packing("tokens_of_words:failing"), replace=True)
    assert output.read_bytes() == before
    pack(files, output, replace=True)
    assert output.read_bytes() != before
    with pytest.raises(ToolkitError, match="the file is both input and output"):
        pack([output], output, replace=True)


def test_what_a_killed_one_left_is_taken_over_and_a_living_one_is_not_disturbed(files, tmp_path):
    output = tmp_path / "all.tokens"
    (tmp_path / "slow.py").write_text("import time\ndef encode(text):\n    time.sleep(60)\n")
    program = (
        "from pathlib import Path; from toolkit.train.data.preprocess import *; "
        f"pack([Path({str(files[0])!r})], Path({str(output)!r}), Packing('slow:encode'))"
    )
    packing = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    part = tmp_path / ".all.tokens.part"
    while not part.exists():
        time.sleep(0.02)
    time.sleep(0.1)
    with pytest.raises(ToolkitError, match="another process is writing this file"):
        pack(files, output)
    packing.send_signal(signal.SIGKILL)
    packing.wait()
    assert part.exists() and not output.exists()
    pack(files, output)
    assert not part.exists() and np.array_equal(map_tokens(output), np.frombuffer("".join(TEXTS).encode(), np.uint8))


def test_the_command(toolkit, files, monkeypatch):
    monkeypatch.chdir(toolkit.folder)
    said = toolkit("data", "pack", *files, "-o", "all.tokens", "--end-token", 256, "--processes", 1)
    size = sum(len(text.encode()) + 1 for text in TEXTS)
    assert (said.code, said.err) == (0, "") and said.out.startswith(
        f"all.tokens: {size:,} tokens (uint16) of 4 files, "
    )
    assert (
        toolkit.ok("data", "show", "all.tokens").splitlines()[0]
        == f"{size:,} tokens (uint16) of 4 files, vocabulary 257"
    )
    told = json.loads(toolkit.ok("data", "show", "all.tokens", "--json"))
    assert (told["tokens"], told["dtype"], told["texts"], told["vocabulary"]) == (size, "uint16", 4, 257)
    assert said.out.endswith(f" of 4 files, {Path('all.tokens').stat().st_size / 1000:.1f} kB\n"), "of what was written"
    Path("a.jsonl").write_text("1\n2\n")
    Path("b.jsonl").write_text("1\n")
    Path("empty").touch()
    indexed = toolkit.ok("data", "index", "a.jsonl", "b.jsonl", "empty")
    assert indexed == "a.jsonl: 2 records\nb.jsonl: 1 record\nempty: 0 records\n"
    for code, argv in {
        4: ("data", "pack", "none.txt", "-o", "x"),
        2: ("data", "pack", files[0], "-o", "no/such/folder/x"),
    }.items():
        said = toolkit(*argv)
        assert said.code == code and said.err.startswith("toolkit: ") and "Fix: " in said.err, said
    for argv in (
        ("data", "pack", files[0], "-o", "all.tokens"), ("data", "pack", ".", "-o", "x"), ("data", "show", files[0]),
        ("data", "pack", files[0], "-o", "x", "--dtype", "int8"), ("data", "pack", files[0], "-o", "x", "--end-token", 70000),
        ("data", "pack", files[0], "-o", "x", "--vocabulary", 10), ("data", "pack", files[0], "-o", "."),
        ("data", "pack", files[0], "-o", "x", "--tokenizer", "words"), ("data", "index", "."),
        ("data", "pack", "empty", "-o", "x"), ("data", "pack", "empty", "-o", "x", "--end-token", 1), ("data", "index", "empty"),
    ):  # fmt: skip
        said = toolkit(*argv)
        assert (
            said.code == 2 and said.err.startswith("toolkit: ") and "Fix: " in said.err and "Traceback" not in said.err
        ), said


def test_a_vocabulary_that_is_not_named_is_said_with_the_fix(toolkit, files, monkeypatch):
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    argv = ("data", "pack", files[0], "-o", "words.tokens", "--tokenizer", "tokens_of_words:lengths", "--processes", 1)
    said = toolkit(*argv)
    assert (said.code, said.out) == (0, "words.tokens: 80 tokens (uint16) of 1 file, 224 bytes\n")
    unnamed = "toolkit: the file does not state its vocabulary size, which train_lm needs. Fix: pack the file again with --vocabulary N"
    assert said.err.startswith(unnamed)
    assert toolkit("data", "show", "words.tokens").err.startswith(unnamed)
    assert toolkit(*argv, "--vocabulary", 100, "--force").err == ""


def test_a_tokenizer_that_makes_nothing_of_a_text_leaves_no_file(files, tmp_path):
    with pytest.raises(ToolkitError, match="returned no tokens for this text"):
        pack(files, tmp_path / "all.tokens", Packing("tokens_of_words:nothing"))
    assert not beside(tmp_path / "all.tokens")


def test_a_bar_stands_on_a_terminal_alone(files, tmp_path, terminal):
    argv = [
        str(Path(sys.executable).with_name("toolkit")),
        "data",
        "pack",
        *map(str, files),
        "-o",
        "x.tokens",
        "--processes",
        "1",
    ]
    window = terminal(argv, cwd=tmp_path, env={**os.environ, "TERM": "xterm"})
    assert window.wait() == 0
    assert "tokenising" in window.screen
