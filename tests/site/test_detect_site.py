"""Which site is this: the order of the means, and that nothing is guessed."""

import platform
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from toolkit.config.document import Origin
from toolkit.config.request import resolve_job
from toolkit.errors import ToolkitError
from toolkit.site import load
from toolkit.site.load import choose_site, detect_site


@pytest.fixture(autouse=True)
def no_slurm_of_this_machine(monkeypatch, tmp_path):
    """The tests bring their own slurm.conf."""
    monkeypatch.setattr(load, "SLURM_CONF_PATHS", (tmp_path / "slurm.conf",))


@pytest.fixture
def scheduler(tmp_path) -> FakeSlurm:
    """A Slurm with sbatch alone, which toolkit looks for and never calls."""
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.respond("sbatch")
    return slurm


def cluster(path: Path, name: str) -> Path:
    path.write_text(f"# ClusterName=comment\nSlurmctldHost=h\n clustername = {name} # ours\n")
    return path


HOST = platform.node()
MEANS = {
    "e": '[detect]\nenvironment = { CENTRE = "ours*" }\n',
    "c": '[detect]\ncluster_name = "cc"\n',
    "h": f'[detect]\nhostnames = ["other", "{HOST[:2]}*"]\n',
    "f": '[detect]\nfiles = ["/nowhere", "/etc/passwd"]\n',
}


def test_no_scheduler_is_this_machine(sites):
    found = detect_site(sites(**MEANS) | {"CENTRE": "ours-1"})
    assert (found.site.name, found.reason) == ("local", "no scheduler command (sbatch) on PATH")


def test_the_order_of_the_means(sites, scheduler, tmp_path):
    environ = sites(**MEANS)
    cluster(tmp_path / "slurm.conf", "cc")
    every = environ | {"CENTRE": "ours-1"}
    assert detect_site(every).reason == "CENTRE=ours-1 in the environment"
    assert detect_site(environ | {"CENTRE": "theirs"}).reason == f"ClusterName cc ({tmp_path}/slurm.conf)"
    cluster(tmp_path / "slurm.conf", "another")
    assert detect_site(environ).reason == f"host {HOST} matches {HOST[:2]}*"
    (tmp_path / "sites" / "h.toml").unlink()
    assert detect_site(environ).reason == "/etc/passwd exists"
    assert detect_site(environ).site.name == "f"


def test_where_the_cluster_name_is_looked_for(sites, scheduler, tmp_path):
    environ = sites(c=MEANS["c"])
    assert detect_site(environ | {"SLURM_CLUSTER_NAME": "cc"}).reason == "ClusterName cc (SLURM_CLUSTER_NAME)"
    conf = cluster(tmp_path / "own.conf", "cc")
    assert detect_site(environ | {"SLURM_CONF": str(conf)}).reason == f"ClusterName cc ({conf})"
    scheduler.respond("scontrol", "ClusterName             = cc\n")
    assert detect_site(environ).reason == "ClusterName cc (scontrol show config)"


def test_the_sites_own_slurm_conf_counts_only_without_a_cluster(sites, scheduler, tmp_path):
    """A dev cluster's folder that was left behind must not take the place of the real cluster."""
    conf = cluster(tmp_path / "dev.conf", "dev")
    environ = sites(dev=f'[detect]\ncluster_name = "dev"\n[scheduler]\nconf = "{conf}"\n')
    assert detect_site(environ).reason == f"ClusterName dev ({conf})"
    cluster(tmp_path / "slurm.conf", "real")
    with pytest.raises(ToolkitError, match=r"no site file matches it \(host .*, ClusterName real \(/"):
        detect_site(environ)


def test_an_unknown_scheduler_is_refused(sites, scheduler):
    with pytest.raises(ToolkitError) as caught:
        detect_site(sites(mine=MEANS["c"]))
    assert str(caught.value) == (
        f"this machine has a scheduler, but no site file matches it (host {HOST}). "
        "Fix: create one with `toolkit site init`; `toolkit site list` shows the existing ones"
    )


def test_two_matches_are_refused(sites, scheduler):
    with pytest.raises(ToolkitError) as caught:
        detect_site(sites(one=MEANS["f"], two=MEANS["f"]))
    assert str(caught.value) == (
        "several sites match (one: /etc/passwd exists; two: /etc/passwd exists). "
        "Fix: choose one with --site or TOOLKIT_SITE"
    )


def test_a_name_wins_over_what_the_machine_says(sites, scheduler):
    environ = sites(**MEANS) | {"CENTRE": "ours"}
    assert detect_site(environ | {"TOOLKIT_SITE": "f"}).site.name == "f"
    found = choose_site("c", environ | {"TOOLKIT_SITE": "f"})
    assert (found.site.name, found.reason) == ("c", "--site")
    assert choose_site(None, environ).site.name == "e"


def test_an_exported_slurm_conf_is_the_detected_sites(sites, scheduler, tmp_path, capsys):
    """Two clusters of one name: the one that the variable names is meant, and the job records it."""
    own, mine = cluster(tmp_path / "own.conf", "cc"), cluster(tmp_path / "mine.conf", "cc")
    environ = sites(c=f'{MEANS["c"]}[scheduler]\nconf = "{own}"\n') | {"SLURM_CONF": str(mine)}
    job = tmp_path / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    resolved = resolve_job(job, site=choose_site(None, environ).site, environ=environ)
    assert resolved.scheduler.conf == str(mine)
    assert resolved.origin("scheduler.conf") == Origin("environment", "SLURM_CONF")
    assert capsys.readouterr().err == ""
    # By name the site's own file counts, and it is said.
    for name, variables in (("c", environ), (None, environ | {"TOOLKIT_SITE": "c"})):
        assert choose_site(name, variables).site.scheduler.conf == str(own)
        assert capsys.readouterr().err == f"toolkit: SLURM_CONF={mine} is ignored: site c uses {own}\n"
    choose_site("c", environ | {"SLURM_CONF": str(own)})
    assert capsys.readouterr().err == ""


def test_an_exported_slurm_conf_that_is_not_there_is_named_at_once(sites, scheduler, tmp_path):
    scheduler.respond("scontrol")  # the real one waits for the file
    environ = sites(c=MEANS["c"]) | {"SLURM_CONF": str(tmp_path / "away.conf")}
    with pytest.raises(ToolkitError, match="file not found") as error:
        detect_site(environ)
    assert error.value.where == f"SLURM_CONF={tmp_path}/away.conf"
    assert scheduler.calls("scontrol") == []
