"""Damaged outputs: nothing breaks, nothing is stated that no line says, and structural damage is named with its line."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from founded import unfounded
from readings import CORPUS, every_sample, is_structural, read, real_samples, samples
from test_corpus import truth_of
from text_mutations import mutations

from toolkit.cli.parse import KINDS

IN_A_SAMPLE, IN_ALL = 10, 200
MUST_WARN = 0.95
EVIDENCE = Path(__file__).parents[3] / "evidence" / "parse_corpus.json"
# kind: the share of structural damages that can be noticed, and why it is not all.
LESS: dict[str, tuple[float, str]] = {}


def measured(sample, count):
    """Counts of what becomes of so many accidents of a sample, and what was stated without a line for it."""
    whole = read(sample.kind, sample.text)
    seen, problems = Counter(), []
    for number, mutation in enumerate(mutations(sample.text, str(sample), count)):
        seen["mutations"] += 1
        where = f"{sample}, accident {number}, {mutation.name}"
        try:
            now = read(sample.kind, mutation.text)
        except Exception as error:  # noqa: BLE001 what a reader raises is what is counted
            seen["raised"] += 1
            problems.append(f"{where}: {error!r}")
            continue
        if now.answer is not None:
            stated = unfounded(sample.kind, now.answer, mutation.text, whole.answer, sample.text)
            seen["unfounded"] += len(stated)
            problems += [f"{where}: {problem}" for problem in stated]
        warned = now.answer is None or bool(set(now.warnings) - set(whole.warnings))
        changed = now.answer != whole.answer
        structural = is_structural(sample, whole, mutation, now)
        seen["changed"] += changed
        seen["changed_and_warned"] += changed and warned
        seen["structural"] += structural
        seen["structural_and_warned"] += structural and warned
        if structural and not warned:
            seen[f"unnoticed: {mutation.name}"] += 1
    return seen, problems


@pytest.mark.parametrize("sample", every_sample(), ids=str)
def test_a_damaged_output_is_read_or_refused_and_says_only_what_stands_there(sample):
    _, problems = measured(sample, IN_A_SAMPLE)
    assert not problems, "\n".join(problems)


@pytest.mark.evidence
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the real outputs are not here")
@pytest.mark.timeout(3600)
def test_all_damages_of_all_real_outputs():
    began, kinds, problems = time.monotonic(), {}, []
    for kind in KINDS:
        real = real_samples(kind)
        right = sum(right_answer(sample) for sample in real)
        seen = Counter()
        for sample in real or samples(kind):
            counts, more = measured(sample, IN_ALL)
            seen += counts
            problems += more
        counted = {key: seen[key] for key in (
            "mutations", "raised", "unfounded", "changed", "changed_and_warned", "structural", "structural_and_warned"
        )}  # fmt: skip
        unnoticed = {key.partition(": ")[2]: seen[key] for key in sorted(seen) if key.startswith("unnoticed")}
        kinds[kind] = {"samples": len(real), "right": right, **counted, "unnoticed": unnoticed}
    EVIDENCE.parent.mkdir(exist_ok=True)
    result = {"mutations_per_text": IN_ALL, "seconds": round(time.monotonic() - began), "kinds": kinds}
    EVIDENCE.write_text(json.dumps(result, indent=1) + "\n")
    assert not problems, "\n".join(problems[:200])
    for kind, row in kinds.items():
        share = row["structural_and_warned"] / max(1, row["structural"])
        assert share >= LESS.get(kind, (MUST_WARN, ""))[0], (kind, row)


def right_answer(sample):
    truth, answer = truth_of(sample), read(sample.kind, sample.text).answer or {}
    return {key: answer.get(key) for key in truth} == truth
