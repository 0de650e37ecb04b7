"""What terminals, pipes and logs add to a text is taken away, and a cut end is named."""

import pytest

from toolkit.topology.readers.lines import lines_of


def texts(text):
    lines, _ = lines_of(text)
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    return [line.text for line in lines]


def test_escapes_and_carriage_returns_go():
    assert texts("\x1b[4mGPU0\x1b[0m\tX\r\n\x1b]0;title\x07\n  a\x1b(Bb\n") == ["GPU0\tX", "", "  ab"]
    assert texts("a\rb\r") == ["a", "b"]  # the line ends of old editors
    assert texts("name\x0cgoes on\x85\u2028here\n") == ["name\x0cgoes on\x85\u2028here"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("node1: CA 'a'\nnode1:\nnode1:   Port 1:\n", ["CA 'a'", "", "  Port 1:"]),
        ("0: a\n0: b\n", ["a", "b"]),
        ("2026-01-02T03:04:05.123Z a\n\n2026-01-02T03:04:06.456Z   b\n", ["a", "", "  b"]),
        ("[2026-01-02 03:04:05] n1: a\n[2026-01-02 03:04:05] n1: b\n", ["a", "b"]),
        ("Jan  2 03:04:05 a\nJan 12 03:04:05 b\n", ["a", "b"]),
        ("CPU(s): 4\nCPU(s) list: 0-3\n", ["CPU(s): 4", "CPU(s) list: 0-3"]),
        ("node0: a\nnode1: b\n", ["node0: a", "node1: b"]),  # of two machines: nothing to take away
        ("State: Active\n", ["State: Active"]),
    ],
)
def test_what_stands_before_every_line_goes(text, lines):
    assert texts(text) == lines


def test_a_text_without_a_last_line_end_is_named():
    assert lines_of("a\nb\n")[1] == lines_of("")[1] == lines_of("a\n  ")[1] == ()
    assert lines_of("a\n\x1b[1mbc")[1] == ("line 2: no newline at the end, so it may be truncated: 'bc'",)
