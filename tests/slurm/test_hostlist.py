"""Host lists: against what we wrote them from, against scontrol, and against real ones with their truth."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.slurm.commands import Slurm
from toolkit.slurm.hostlist import expand_hostlist, first_host

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "hostlist"
PREFIX = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z]{1,3})?", fullmatch=True)


@st.composite
def bracket(draw):
    """(the text inside brackets, the numbers that it means)."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, more = draw(st.integers(0, 200)), draw(st.integers(0, 4))
        width = draw(st.integers(1, 4))
        texts.append(f"{low:0{width}}" + (f"-{low + more:0{width}}" if more else ""))
        width = max(width, len(str(low)))
        numbers += [f"{number:0{width}}" for number in range(low, low + more + 1)]
    return ",".join(texts), numbers


@st.composite
def expression(draw, most_brackets=3, suffixes=True):
    """(a host list, the hosts that it means)."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(PREFIX)
        names = [text]
        for _ in range(draw(st.integers(0, most_brackets))):
            inside, numbers = draw(bracket())
            middle = draw(PREFIX) if suffixes else ""
            text += f"[{inside}]{middle}"
            names = [name + number + middle for name in names for number in numbers]
        texts.append(text)
        hosts += names
    return ",".join(texts), hosts


@given(expression())
def test_what_was_written_is_read_back_in_order(pair):
    text, hosts = pair
    assert expand_hostlist(text) == list(dict.fromkeys(hosts))
    assert first_host(text) == hosts[0]


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="no scontrol here")
@settings(max_examples=60, deadline=None)
@given(pair=expression(most_brackets=1, suffixes=False))
def test_scontrol_reads_the_same(tmp_path_factory, pair):
    # One bracket at a name's end: with more, scontrol orders some wrongly, and it refuses text behind a bracket.
    conf = tmp_path_factory.getbasetemp() / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")  # it reads this and asks no controller
    told = Slurm(configuration=str(conf)).call(["scontrol", "show", "hostnames", pair[0]])
    assert expand_hostlist(pair[0]) == list(dict.fromkeys(told.split()))  # it names a host as often as written


@pytest.mark.parametrize("sidecar", [pytest.param(path, id=path.stem) for path in sorted(CORPUS.glob("*.json"))])
def test_real_expressions_mean_what_their_sidecar_says(sidecar):
    record = json.loads(sidecar.read_text())
    text, truth = (sidecar.parent / record["file"]).read_text().strip(), record["truth"]
    if not truth["valid"]:
        with pytest.raises(ToolkitError):
            expand_hostlist(text)
        return
    hosts = expand_hostlist(text)
    assert len(hosts) == truth["count"]
    if "expansion" in truth:
        assert hosts == truth["expansion"]
    else:
        assert (hosts[0], hosts[-1]) == (truth["first"], truth["last"])
        digests = {hashlib.sha1(mark.join(hosts).encode()).hexdigest() for mark in ("\n", ",", " ")}
        digests.add(hashlib.sha1(("\n".join(hosts) + "\n").encode()).hexdigest())
        assert truth["expansion_sha1"] in digests


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[3-8,1-5],n1", ["n3", "n4", "n5", "n6", "n7", "n8", "n1", "n2"]),
        ("row[0,1]_rack[2-3]", ["row0_rack2", "row0_rack3", "row1_rack2", "row1_rack3"]),
        (" a b,,c\n", ["a", "b", "c"]),
        ("", []),
    ],
)
def test_width_duplicates_order_and_separators(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n[1-3", "unclosed bracket"), ("n1]", "unbalanced"), ("n[1[2]]", "unbalanced"), ("n[]", "a number"),
        ("n[1-]", "a number"), ("n[-3]", "a number"), ("n[x]", "a number"), ("n[1,,2]", "a number"),
        ("n[3-1]", "decreasing"), ("n[²]", "a number"), ("n[٣]", "a number"),
        ("n[1-2000000]", "more than"), ("n[1-99999999999999999999]", "more than"), ("a[1-2000]b[1-2000]", "more than"),
        (",".join(["n[1-600000]"] * 2), "more than"),
    ],
)  # fmt: skip
def test_what_is_no_host_list_is_refused_in_words(text, problem):
    with pytest.raises(ToolkitError, match=problem) as error:
        expand_hostlist(text)
    assert error.value.fix


@given(st.text(alphabet="n[]-,0123 x²", max_size=12))
def test_any_text_is_read_or_refused_and_never_a_traceback(text):
    try:
        hosts = expand_hostlist(text)
    except ToolkitError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)


def test_no_host_has_no_first():
    with pytest.raises(ToolkitError, match="does not name a host"):
        first_host("")
