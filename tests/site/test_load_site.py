"""Site files: where they are found, how one extends another, and what is refused."""

from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.site.load import load_site, site_files


def refusal(call):
    with pytest.raises(ToolkitError) as caught:
        call()
    return str(caught.value)


def test_a_site_stands_on_what_it_extends(sites, tmp_path):
    environ = sites(
        base='contact = "us"\nchecked = "by hand"\n[launcher]\nkind = "srun"\noptions = ["-a", "-b"]\n[partitions.p]\nmax_nodes = 4\n',
        top='extends = "base"\n[launcher]\noptions = ["-c"]\n[partitions.p]\nmax_time = "30"\n[partitions.q]\n',
    )
    site = load_site("top", environ)
    assert (site.name, site.contact, site.checked) == ("top", "us", "")
    assert (site.launcher.kind, site.launcher.options) == ("srun", ["-c"])
    assert (site.partitions["p"].max_nodes, site.partitions["p"].max_time_s) == (4, 1800)
    assert site.origins["partitions.p.max_nodes"].detail == f"{tmp_path}/sites/base.toml:8"
    assert site.origins["launcher.options"].detail == f"{tmp_path}/sites/top.toml:4"


def test_a_circle_is_named(sites, tmp_path):
    environ = sites(a='extends = "b"\n', b='extends = "c"\n', c='extends = "a"\n')
    assert refusal(lambda: load_site("a", environ)) == (
        f"{tmp_path}/sites/c.toml:2:extends: circular `extends`: a → b → c → a. Fix: remove one of these `extends`"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[scheduler]\nkind = 'pbs'",
            "s.toml:3:scheduler.kind: 'pbs' is rejected: input should be 'slurm' or 'local'. "
            'Fix: use one of "slurm", "local"',
        ),
        (
            "[gpu]\nrequest = '--gres=gpu:{n}'",
            "s.toml:3:gpu.request: '--gres=gpu:{n}' is not a valid option: expected one {count} in it. "
            'Fix: use a string with {count}, such as "--gres=gpu:{count}"',
        ),
        (
            "[partitions.p]\nmax_node = 4",
            "s.toml:3:partitions.p.max_node: unknown key 'max_node' in [partitions.p]. Fix: write 'max_nodes'",
        ),
        (
            "[partitions.p]\nmax_time = 'day'",
            "s.toml:3:partitions.p.max_time: 'day' is not a valid Slurm time. Fix: use ",
        ),
        (
            "[partition.p]\nmax_nodes = 4",
            "s.toml:2:partition: unknown key or table 'partition'. Fix: write 'partitions'",
        ),
        (
            "[partitions.p]\ndefault = true\n[partitions.q]\ndefault = true",
            "s.toml:5:partitions.q.default: expected one default partition, got p and q. Fix: keep `default = true` at only one partition",
        ),
        (
            "[scheduler]\noptions = ['--x\\ny']\n".replace("'", '"'),
            "s.toml:3:scheduler.options: contains the control character '\\n'. Fix: use a list of options such as ",
        ),
        ("extends = 'devclustr'", "s.toml:2:extends: site 'devclustr' not found. Fix: write 'devcluster'"),
    ],
)
def test_a_wrong_site_file(sites, tmp_path, text, message):
    environ = sites(s=text)
    assert refusal(lambda: load_site("s", environ)).removeprefix(f"{tmp_path}/sites/").startswith(message)


def test_the_name_is_the_files(sites, tmp_path):
    environ = sites()
    path = tmp_path / "sites" / "s.toml"
    path.write_text('name = "t"\n')
    assert (
        refusal(lambda: load_site("s", environ))
        == f"{path}:1:name: expected the file name without .toml, 's', got 't'. Fix: set name = \"s\""
    )


def test_no_such_site(sites):
    environ = sites(mine="")
    with pytest.raises(NotFoundError) as caught:
        load_site("lumy", environ)
    assert str(caught.value) == "site 'lumy' not found. Fix: write 'lumi'"


def test_a_users_file_hides_a_shipped_one(sites, tmp_path):
    environ = sites(lumi='docs = "mine"\n')
    assert load_site("lumi", environ).docs == "mine"
    home = tmp_path / "home/.config/toolkit/sites"
    home.mkdir(parents=True)
    (home / "lumi.toml").write_text('name = "lumi"\ndocs = "home"\n')
    (home / "other.toml").write_text('name = "other"\n')
    files = site_files(environ)
    assert files["lumi"] == tmp_path / "sites/lumi.toml"
    assert {"other", "local", "devcluster"} <= set(files)


def test_a_job_takes_the_sites_tables_with_their_origins(tmp_path):
    job = tmp_path / "j.toml"
    job.write_text('[job]\nentry = ["true"]\naccount = "project_1"\nnodes = 2\n')
    resolved = resolve_job(job, site=load_site("lumi", {}), environ={})
    assert (resolved.job.partition, resolved.job.ranks_per_node, resolved.job.cpus_per_rank) == ("standard-g", 8, 7)
    assert resolved.network.interface == "hsn0"
    assert Path(resolved.origin("network.interface").detail.split(":")[0]).name == "lumi.toml"
    assert resolved.origin("site.docs").layer == "site"
