"""Secrets: ranks have them, and nothing that we write, call or print holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.resolved import looks_secret, shown_arguments

WORD = "s3cret-w0rd"


def everything_written(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_ranks_have_them_and_no_file_does(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, command = toolkit.folder / "kept", toolkit.folder / "print it"
    kept.write_text(WORD + "-file\n")
    kept.chmod(0o600)
    command.write_text(f"#!/bin/sh\necho {WORD}-command\n")
    command.chmod(0o755)
    monkeypatch.setenv("OF_SHELL", WORD + "-shell")
    monkeypatch.setenv("OF_FILE", "the shell's, which is not asked for")
    job = toolkit.job(
        'printf "%s %s %s" "${OF_SHELL#s3}" "${OF_FILE#s3}" "${OF_COMMAND#s3}"',
        more=f"[env.secrets]\nOF_SHELL = 'env'\nOF_FILE = 'file:{kept}'\nOF_COMMAND = '''command:\"{command}\"'''\n",
    )
    run = toolkit.submit(job, "--wait")
    assert run.attempt(0).log_file(0).read_text() == "cret-w0rd-shell cret-w0rd-file cret-w0rd-command"
    assert WORD not in everything_written(run.path)


def test_a_rank_that_quotes_one_is_quoted_without_it(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_SHELL", WORD)
    job = toolkit.job(
        "echo cannot reach https://$OF_SHELL@host; exit 3",
        more="[restart]\ncrashes = 0\n[env]\nsecrets = { OF_SHELL = 'env' }\n",
    )
    said = toolkit("submit", job, "--wait")
    assert said.code == 3
    run_id = toolkit.ok("status", "last").splitlines()[1].split()[1]
    for told in (toolkit.run(run_id).attempt(0).exit_file.read_text(), toolkit("explain", "last").out, said.err):
        assert WORD not in told
    assert "https://***@host" in toolkit.run(run_id).attempt(0).exit_file.read_text()


def test_the_error_of_a_script_that_quotes_one_is_written_without_it(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_SHELL", WORD)
    (toolkit.folder / "work.py").write_text(
        "import os\n\nraise OSError('no answer from ' + os.environ['OF_SHELL'] + '@host')\n"
    )
    job = toolkit.folder / "work.toml"
    job.write_text("[job]\nentry = 'work.py'\n[restart]\ncrashes = 0\n[env]\nsecrets = { OF_SHELL = 'env' }\n")
    said = toolkit("run", job)
    assert said.code == 1 and "OSError: no answer from ***@host at work.py:3" in said.err, said
    assert WORD not in said.err + said.out + everything_written(next(toolkit.runs.glob("work/*")))


@pytest.mark.parametrize(
    ("reference", "said", "fix"),
    [
        ("env", "OF_SHELL is not set in this shell", "export OF_SHELL"),
        ("file:/nowhere/at/all", "cannot read /nowhere/at/all", "write the secret into this file"),
        ("file:{open}", "other users may read", "chmod 600"),
        ("hf_abcdefghijklmnop", "not a valid reference", '"file:/PATH"'),
        ("command:'x", "not a valid reference", '"command:COMMAND"'),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(toolkit, reference: str, said: str, fix: str) -> None:
    (toolkit.folder / "open").write_text("x")
    (toolkit.folder / "open").chmod(0o644)
    value = reference.format(open=toolkit.folder / "open")
    refused = toolkit("submit", toolkit.job("true", more=f'[env.secrets]\nOF_SHELL = "{value}"\n'))
    assert refused.code == 2
    assert said in refused.err and fix in refused.err and "env.secrets.OF_SHELL" in refused.err
    assert "hf_abc" not in refused.err
    assert not list(toolkit.runs.glob("*/*"))


def test_a_variable_stands_in_one_place(toolkit) -> None:
    more = '[env]\nvars = { A_KEY = "x" }\nsecrets = { A_KEY = "env" }\n'
    refused = toolkit("submit", toolkit.job("true", more=more))
    assert refused.code == 2 and "A_KEY is also in `vars`" in refused.err


def test_a_command_that_fails_ends_the_launch(toolkit) -> None:
    job = toolkit.job("true", more='[env.secrets]\nOF_COMMAND = "command:false"\n')
    said = toolkit("submit", job, "--wait")
    assert said.code == 125
    assert "the secret OF_COMMAND: false exited with 1" in said.err


def test_what_looks_like_one_is_warned_of_and_not_shown(toolkit) -> None:
    job = toolkit.job("true", more=f'[env.vars]\nHF_TOKEN = "{WORD}"\n')
    said = toolkit("render", job, "--set", f"args.api_key={WORD}")
    assert f"{job}:4:env.vars.HF_TOKEN: looks like a secret" in said.err
    assert 'write HF_TOKEN = "env" or "file:PATH" into [env.secrets]' in said.err
    assert "args.api_key" in said.err and WORD not in said.err
    (record,) = toolkit.runs.glob("*/*/record.json")
    assert "args.api_key=***" in record.read_text()
    for words in ([], ["--origin"], ["--json"]):
        shown = toolkit.ok("config", "show", job, "--set", f"args.api_key={WORD}", *words)
        assert WORD not in shown and "***" in shown


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("env.vars.WANDB_API_KEY", "abc", True), ("env.vars.AWS_SECRET_ACCESS_KEY", "abc", True),
        ("env.vars.TOKENIZERS_PARALLELISM", "false", False), ("env.vars.SSL_KEY", "/etc/key.pem", False),
        ("env.vars.MAX_TOKEN", "512", False), ("args.pad_token", "<pad>", False), ("args.password", "abc", True),
        ("args.note", "ghp_" + "a" * 36, True), ("train.schedule", "cosine", False), ("args.keys", "a,b", False),
    ],
)  # fmt: skip
def test_what_looks_like_one(key: str, value: str, secret: bool) -> None:
    assert looks_secret(key, value) is secret


def test_a_command_line_is_kept_without_them() -> None:
    words = ["toolkit", "submit", "--set", "env.vars.A_TOKEN=abc", "--", "hf_" + "a" * 30]
    assert shown_arguments(words) == ["toolkit", "submit", "--set", "env.vars.A_TOKEN=***", "--", "***"]


@pytest.mark.parametrize(
    ("url", "said", "fix"),
    [
        (None, "HOOK was not set", 'export HOOK, or set webhook = "file:~/.hook"'),
        ("", "HOOK was not set", "export HOOK"),
        ("s3cret-w0rd.example/x", "expected an http or https URL in HOOK", "https://"),
        ("ftp://s3cret-w0rd.example", "expected an http or https URL in HOOK", "https://"),
        ("https://host:s3cret-w0rd/", "expected an http or https URL in HOOK", "https://"),
    ],
)
def test_a_webhook_that_leads_nowhere_is_refused(toolkit, monkeypatch, url: str | None, said: str, fix: str) -> None:
    if url is not None:
        monkeypatch.setenv("HOOK", url)
    job = toolkit.job("true", more='[notify]\nwebhook = "env:HOOK"\n')
    for command in ("submit", "preflight"):
        refused = toolkit(command, job)
        assert refused.code == 2 and f"{job}:4:notify.webhook: {said}" in refused.err and fix in refused.err
        assert WORD not in refused.err + refused.out
    assert not list(toolkit.runs.glob("*/*"))
