"""fi_info of several providers, with -v, and what is left of it when lines are damaged."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.fi_info import answer_fi_info, parse_fi_info

TCP = """provider: tcp;ofi_rxm
    fabric: 10.0.0.0/24
    domain: eth0
    version: 120.0
    type: FI_EP_RDM
    protocol: FI_PROTO_RXM
"""
EFA = """provider: efa
    fabric: EFA-fe80::12:34ff:fe56:789a
    domain: rdmap16s27-rdm
    version: 120.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
"""
TEXT = TCP + EFA
VERBOSE = """---
fi_info:
    caps: [ FI_MSG, FI_RMA ]
    mode: [  ]
    addr_format: FI_SOCKADDR_IN
    src_addr: fi_sockaddr_in://10.0.0.7:0
    fi_tx_attr:
        caps: [ FI_MSG ]
        size: 256
    fi_ep_attr:
        type: FI_EP_RDM
        protocol: FI_PROTO_RXM
        protocol_version: 1
    fi_domain_attr:
        domain: 0x0
        name: eth0
        threading: FI_THREAD_SAFE
    fi_fabric_attr:
        name: 10.0.0.0/24
        prov_name: tcp;ofi_rxm
        prov_version: 120.0
        api_version: 1.20
"""


def test_records_of_two_providers():
    facts, warnings = answer_fi_info(TEXT)
    assert not warnings
    assert (facts["providers"], facts["domains"]) == (["efa", "tcp;ofi_rxm"], ["eth0", "rdmap16s27-rdm"])
    assert facts["records"][0] == {
        "provider": "tcp;ofi_rxm", "fabric": "10.0.0.0/24", "domain": ["eth0"], "version": "120.0",
        "type": "FI_EP_RDM", "protocol": "FI_PROTO_RXM",
    }  # fmt: skip
    (_, second), _ = parse_fi_info(TEXT)
    assert (second.provider, second.domains, second.endpoint_type) == ("efa", ("rdmap16s27-rdm",), "FI_EP_RDM")


def test_several_domains_under_one_provider():
    text = "provider: cxi\nfabric: cxi\ndomain: cxi0\ndomain: cxi1\ntype: FI_EP_RDM\nprotocol: FI_PROTO_CXI\n"
    facts, warnings = answer_fi_info(text)
    assert facts["records"][0]["domain"] == ["cxi0", "cxi1"]
    assert "version" not in facts["records"][0], "what is not printed is left out"
    assert warnings == ("line 1: a record without version",)
    assert "cxi2 does not follow cxi0" in "".join(answer_fi_info(text.replace("cxi1", "cxi2"))[1])
    assert "cxi0 does not follow cxi3" in "".join(
        answer_fi_info(text.replace("cxi0\ndomain: cxi1", "cxi3\ndomain: cxi0"))[1]
    )


def test_verbose_output_reads_the_same():
    facts, warnings = answer_fi_info(VERBOSE)
    assert (facts, warnings) == (answer_fi_info(TCP)[0], ())
    three = answer_fi_info(VERBOSE + VERBOSE.replace("eth0", "eth1") + VERBOSE.replace("eth0", "lo"))[0]
    assert [record["domain"] for record in three["records"]] == [["eth0"], ["eth1"], ["lo"]]


def test_prefixes_prompts_and_unknown_newer_words():
    for other in (
        re.sub("(?m)^", "node5: ", TEXT.rstrip()) + "\n",
        "$ fi_info\n" + TEXT.replace("\n", "\r\n"),
        "\x1b[1m" + TEXT,
    ):
        assert answer_fi_info(other) == answer_fi_info(TEXT)
    newer = TCP.replace("tcp;ofi_rxm", "zephyr").replace("FI_PROTO_RXM", "FI_PROTO_ZEPHYR")
    facts, warnings = answer_fi_info(newer)
    assert (facts["providers"], facts["records"][0]["protocol"], warnings) == (["zephyr"], "FI_PROTO_ZEPHYR", ())


def test_nothing_found_is_an_answer():
    facts, warnings = answer_fi_info("fi_getinfo: -61 (No data available)\n")
    assert facts == {"records": [], "providers": [], "domains": []}
    assert warnings == ("line 1: not part of a record: 'fi_getinfo: -61 (No data available)'",)


@pytest.mark.parametrize(
    ("said", "damaged", "key", "line"),
    [
        ("provider: efa", "provider: fa", "provider", 7),
        ("EFA-fe80::12:34ff", "EFA-fe80::1234ff", "fabric", 8),
        ("FI_EP_RDM\n    protocol: FI_PROTO_EFA", "FI_EP_RD\n    protocol: FI_PROTO_EFA", "type", 11),
        ("FI_PROTO_EFA", "FI_PROTO_EF", "protocol", 12),
        (
            "version: 120.0\n    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA",
            "version: 120\n    type: FI_EP_RDM",
            "version",
            10,
        ),
    ],
)
def test_damaged_values_are_null_and_named(said, damaged, key, line):
    facts, warnings = answer_fi_info(TEXT.replace(said, damaged))
    assert facts["records"][1][key] is None
    assert any(warning.startswith(f"line {line}: {key} is not read from") for warning in warnings)


def test_a_damaged_domain_is_no_domain():
    facts, warnings = answer_fi_info(TEXT.replace("rdmap16s27-rdm", "rdmap16s27rdm"))
    assert (facts["records"][1]["domain"], facts["domains"]) == ([None], ["eth0"])
    assert "is no domain of efa" in "".join(warnings)


def test_a_lost_provider_gives_nothing_to_the_record_before():
    facts, warnings = answer_fi_info(TEXT.replace("provider: efa\n", ""))
    assert facts["records"] == answer_fi_info(TCP)[0]["records"]
    assert any("line 7: fabric stands behind" in warning for warning in warnings)


def test_every_repeated_joined_and_lost_line_is_named():
    lines = TEXT.splitlines(keepends=True)
    whole = answer_fi_info(TEXT)[0]["records"]
    for place, line in enumerate(lines):
        facts, warnings = answer_fi_info("".join(lines[: place + 1] + lines[place:]))
        assert facts["records"] == whole and warnings, line
        for text in (
            "".join(lines[:place] + lines[place + 1 :]),
            "".join([*lines[:place], line[:-1], *lines[place + 1 :]]),
        ):
            facts, warnings = answer_fi_info(text)
            assert warnings, line
            values = {value for record in facts["records"] for value in record.values() if isinstance(value, str)}
            assert values <= {value for record in whole for value in record.values() if isinstance(value, str)}


def test_one_line_against_another():
    for text, said in [
        (TEXT + EFA, "line 13: this record is printed a second time"),
        (EFA.replace("-rdm", "-dgrm"), "rdmap16s27-dgrm does not go with FI_EP_RDM"),
        (EFA.replace("rdmap16s27", "rdmp1627"), "no usual domain of efa"),
        (TEXT + "...\n", "line 13: not part of a record: '...'"),
    ]:
        assert said in "".join(answer_fi_info(text)[1])


@settings(deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 60), st.text(max_size=5))
def test_damage_never_raises(begin, count, put):
    for whole in (TEXT, VERBOSE):
        try:
            _, warnings = answer_fi_info(whole[:begin] + put + whole[begin + count :])
        except CheckFailedError:
            continue
        assert all(re.match(r"line \d+: ", warning) for warning in warnings)


def test_texts_of_something_else_are_refused():
    for text in ("", "hello\n", "psm3:\n    version: 7.0\n"):
        with pytest.raises(CheckFailedError):
            answer_fi_info(text)
