"""Accounting: slurmdbd on a MariaDB of the cluster's own, reached by a unix socket only."""

from __future__ import annotations

from toolkit.devcluster.configuration import ACCOUNT, SLURM_NAME
from toolkit.devcluster.daemons import launch, listens, slurm_environment
from toolkit.devcluster.layout import CONTROLLER, ClusterSpec, Layout
from toolkit.devcluster.nodes import process_in_node
from toolkit.devcluster.processes import run_program


def start_accounting(layout: Layout, spec: ClusterSpec) -> None:
    """Start database and slurmdbd unless they run, and enter cluster, account and user root."""
    if process_in_node(layout, CONTROLLER, "mariadbd") is None:
        _start_database(layout)
    if process_in_node(layout, CONTROLLER, "slurmdbd") is None:
        # slurmdbd.conf has no key for the database's socket; its client library reads this variable.
        socket_variable = {"MYSQL_UNIX_PORT": str(layout.database_socket)}
        ready = listens(layout, CONTROLLER, layout.first_port + 2)
        launch(layout, CONTROLLER, ["slurmdbd", "-D"], ready, extra_environment=socket_variable).wait()
    _enter_account(layout)


def _start_database(layout: Layout) -> None:
    if not (layout.database / "mysql").exists():
        argv = ["mariadb-install-db", "--no-defaults", f"--datadir={layout.database}", "--user=root"]
        argv += ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
        run_program(argv)
    layout.database_socket.unlink(missing_ok=True)
    argv = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={layout.database}", "--skip-networking"]
    argv += [f"--socket={layout.database_socket}", f"--pid-file={layout.sockets}/mariadb.pid"]
    # What is in it lives as long as the cluster: speed before durability.
    argv += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]
    # slurmdbd asks for this in its manual: its rollups are long transactions.
    argv += ["--innodb-lock-wait-timeout=900"]
    launch(layout, CONTROLLER, argv, layout.database_socket.exists).wait()


def _enter_account(layout: Layout) -> None:
    env = slurm_environment(layout)
    sacctmgr = ["sacctmgr", "--immediate", "--quiet"]
    known = run_program([*sacctmgr, "--noheader", "list", "cluster", "format=cluster"], env=env)
    if SLURM_NAME in known.split():
        return
    run_program([*sacctmgr, "add", "cluster", SLURM_NAME], env=env)
    run_program([*sacctmgr, "add", "account", ACCOUNT, f"cluster={SLURM_NAME}"], env=env)
    run_program([*sacctmgr, "add", "user", "root", f"account={ACCOUNT}", f"cluster={SLURM_NAME}"], env=env)
    # Slurm made root an administrator with the account "root"; jobs shall be recorded under ours.
    where = ["where", "user=root", f"cluster={SLURM_NAME}"]
    run_program([*sacctmgr, "modify", "user", *where, "set", f"defaultaccount={ACCOUNT}"], env=env)
