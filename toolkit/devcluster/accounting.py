"""Accounting: slurmdbd on a MariaDB of the cluster's own, reached by a unix socket only."""

from __future__ import annotations

import shutil

from toolkit.devcluster.configuration import ACCOUNT, cluster_name
from toolkit.devcluster.daemons import answers, launch, slurm_environment
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
        ready = answers(spec.node_address(CONTROLLER), layout.first_port + 2)
        launch(layout, CONTROLLER, ["slurmdbd"], ready, extra_environment=socket_variable).wait()
    _enter_account(layout)


def _start_database(layout: Layout) -> None:
    if not layout.database.exists():
        argv = ["mariadb-install-db", "--no-defaults", f"--datadir={layout.database}", "--user=root"]
        argv += ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
        try:
            run_program(argv)
        except BaseException:
            shutil.rmtree(layout.database, ignore_errors=True)
            raise
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
    cluster = cluster_name(layout)
    if (
        cluster
        in run_program([*sacctmgr, "--noheader", "list", "cluster", "format=cluster%40"], env=env).split()
    ):
        return
    run_program([*sacctmgr, "add", "cluster", cluster], env=env)
    run_program([*sacctmgr, "add", "account", ACCOUNT, f"cluster={cluster}"], env=env)
    run_program([*sacctmgr, "add", "user", "root", f"account={ACCOUNT}", f"cluster={cluster}"], env=env)
