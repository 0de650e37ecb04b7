"""Accounting for a dev cluster: slurmdbd, and a MariaDB of its own that is reachable only by a Unix socket."""

import json
from collections.abc import Iterator
from pathlib import Path

from toolkit.devcluster.configuration import ACCOUNT, slurm_name
from toolkit.devcluster.daemons import launch, listens, slurm_environment
from toolkit.devcluster.layout import CONTROLLER, SPEC_FILE, ClusterSpec, Layout, layout_beside
from toolkit.devcluster.nodes import process_in_node
from toolkit.devcluster.processes import run_program
from toolkit.errors import ToolkitError


def start_accounting(layout: Layout, spec: ClusterSpec) -> None:
    """Start the database and slurmdbd unless they run, and add the cluster, its account and the user root."""
    if spec.has_database:
        _start_daemons(layout)
    _enter_account(layout, slurm_name(layout, spec))


def find_seat(name: str) -> str:
    """Return a free address in the network of cluster `name`, for a controller that shares its accounting.

    Raises NotFoundError if `name` is not up, and ToolkitError if it has no slurmdbd, or no address is free.
    """
    other = layout_beside(name)
    spec = other.read_spec()
    if not spec.has_database:
        raise ToolkitError(
            f"the cluster {name!r} does not have its own slurmdbd", where=str(other.folder),
            fix="choose a cluster that was started with --accounting",
        )  # fmt: skip
    listed = ["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=controlhost"]
    taken = {*run_program(listed, env=slurm_environment(other)).split(), *_seats(other.folder.parent)}
    # .2 is the cluster's own controller, .11 its first node.
    free = [address for number in range(3, 11) if (address := f"{spec.subnet}.{number}") not in taken]
    if not free:
        raise ToolkitError(f"8 clusters already share the accounting of {name!r}", where=str(other.folder),
                           fix="choose another cluster")  # fmt: skip
    return free[0]


def _seats(folder: Path) -> Iterator[str]:
    """Return the seats of all clusters in a folder; sacctmgr does not list a cluster whose slurmctld is down."""
    for spec_file in folder.glob(f"*/{SPEC_FILE}"):
        yield str(json.loads(spec_file.read_text()).get("seat", ""))


def _start_daemons(layout: Layout) -> None:
    if process_in_node(layout, CONTROLLER, "mariadbd") is None:
        _start_database(layout)
    if process_in_node(layout, CONTROLLER, "slurmdbd") is None:
        # slurmdbd.conf has no key for the database socket, but the client library reads this variable.
        socket_variable = {"MYSQL_UNIX_PORT": str(layout.database_socket)}
        ready = listens(layout, CONTROLLER, layout.first_port + 2)
        launch(layout, CONTROLLER, ["slurmdbd", "-D"], ready, extra_environment=socket_variable).wait()


def _start_database(layout: Layout) -> None:
    # Not /tmp, where a server that starts removes the temporary tables of all others.
    temporary = layout.state / "mariadb-tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    if not (layout.database / "mysql").exists():
        argv = ["mariadb-install-db", "--no-defaults", f"--datadir={layout.database}", "--user=root"]
        argv += ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
        argv += [f"--tmpdir={temporary}"]
        run_program(argv)
    layout.database_socket.unlink(missing_ok=True)
    argv = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={layout.database}", "--skip-networking"]
    argv += [f"--socket={layout.database_socket}", f"--pid-file={layout.sockets}/mariadb.pid"]
    argv += [f"--tmpdir={temporary}"]
    # The database is removed with the cluster, so it may sacrifice durability for speed.
    argv += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]
    # The slurmdbd documentation recommends this, because rollups are long transactions.
    argv += ["--innodb-lock-wait-timeout=900"]
    launch(layout, CONTROLLER, argv, layout.database_socket.exists).wait()


def _enter_account(layout: Layout, cluster: str) -> None:
    env = slurm_environment(layout)
    sacctmgr = ["sacctmgr", "--immediate", "--quiet"]
    clusters = run_program([*sacctmgr, "--noheader", "list", "cluster", "format=cluster"], env=env)
    if cluster in clusters.split():
        return
    run_program([*sacctmgr, "add", "cluster", cluster], env=env)
    run_program([*sacctmgr, "add", "account", ACCOUNT, f"cluster={cluster}"], env=env)
    run_program([*sacctmgr, "add", "user", "root", f"account={ACCOUNT}", f"cluster={cluster}"], env=env)
    # By default, Slurm gives root the account "root"; jobs must use the account of this cluster.
    where = ["where", "user=root", f"cluster={cluster}"]
    run_program([*sacctmgr, "modify", "user", *where, "set", f"defaultaccount={ACCOUNT}"], env=env)
