"""The paths, network names, addresses and ports of a dev cluster, all derived from its name and folder.

Thus every command finds the cluster again, and two clusters do not conflict.
"""

import json
import os
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["DEFAULT_NAME", "ClusterSpec", "Layout", "make_layout"]

DEFAULT_NAME = "devcluster"
SPEC_FILE = "cluster.json"
FOLDER_VARIABLE = "TOOLKIT_DEVCLUSTER"
# The node that runs slurmctld, munged and the accounting daemons; no job runs there.
CONTROLLER = "controller"
MOST_NODES = 64
MOST_GPUS = 16
# A socket path has at most 107 characters (unix(7)); the longest socket name below the folder has about 20.
LONGEST_FOLDER = 80


@dataclass(frozen=True)
class ClusterSpec:
    """The options of `up`, stored in the folder.

    `link` is the speed of each node's link in the format of tc ("200mbit"), or "" for no limit. `subnet` is the first
    three bytes of the cluster's /24 network. `options` are additional `Key=Value` lines for slurm.conf. `accounting_of`
    is the name of a cluster whose slurmdbd this one shares, and `seat` the address of this controller in its network.
    `slurm` is the release of Slurm, "" for this machine's, and `root` its root directory, "" for this machine's.
    """

    nodes: int
    gpus: int
    link: str
    accounting: bool
    subnet: str
    options: tuple[str, ...] = ()
    accounting_of: str = ""
    seat: str = ""
    slurm: str = ""
    root: str = ""

    @property
    def programs(self) -> str:
        """The folder of the Slurm release's programs; "" if they are on this machine's PATH."""
        return f"{self.root}/bin" if self.root else ""

    @property
    def has_database(self) -> bool:
        """True if slurmdbd and its database run in this cluster."""
        return self.accounting and not self.accounting_of

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def host_address(self) -> str:
        """The address of this host, which is the login node, on the bridge."""
        return f"{self.subnet}.1"

    def node_address(self, node: str) -> str:
        """Return the address of `node`: .2 for the controller, .11 for node1."""
        number = 2 if node == CONTROLLER else 10 + int(node.removeprefix("node"))
        return f"{self.subnet}.{number}"


@dataclass(frozen=True)
class Layout:
    """Names and paths of one cluster."""

    name: str
    folder: Path

    @property
    def bridge(self) -> str:
        """Name of the bridge, unique to the folder, and prefix of link names: 8 of at most 15 characters in Linux."""
        return f"tkdc{self._number & 0xFFFF:04x}"

    def link(self, node: str) -> str:
        """Name of this host's end of the veth pair to `node`."""
        return self.bridge + ("c" if node == CONTROLLER else f"n{node.removeprefix('node')}")

    def link_to_accounting(self) -> str:
        """Name of this host's end of the controller's second veth pair, to the cluster whose slurmdbd it shares."""
        return self.bridge + "a"

    @property
    def first_port(self) -> int:
        """The first of ten ports, below the ephemeral ports of Linux (from 32768)."""
        return 20000 + self._number % 1200 * 10

    @property
    def first_subnet(self) -> int:
        """Number of the first subnet 10.x.y.0/24 to try when searching for a free one, in [0, 2**14)."""
        return self._number % 2**14

    @property
    def _number(self) -> int:
        return zlib.crc32(f"{self.name}\0{self.folder}".encode())

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        return self.folder / "etc" / "munge.key"

    @property
    def hosts(self) -> Path:
        return self.folder / "etc" / "hosts"

    @property
    def name_services(self) -> Path:
        return self.folder / "etc" / "nsswitch.conf"

    @property
    def epilog(self) -> Path:
        return self.folder / "etc" / "epilog.sh"

    @property
    def mail_program(self) -> Path:
        return self.folder / "etc" / "mail.sh"

    @property
    def sockets(self) -> Path:
        return self.folder / "run"

    @property
    def munge_socket(self) -> Path:
        return self.sockets / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.sockets / "mariadb.socket"

    @property
    def database(self) -> Path:
        return self.folder / "mariadb"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def devices(self) -> Path:
        return self.folder / "dev"

    @property
    def shared(self) -> Path:
        """A folder that all nodes share; unlike /tmp, of which each node has its own."""
        return self.folder / "shared"

    def node_folder(self, node: str) -> Path:
        return self.folder / "nodes" / node

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """The folders that `up` creates and `down` removes."""
        nodes = self.folder / "nodes"
        etc = self.slurm_conf.parent
        return (etc, self.sockets, self.state, self.logs, self.devices, self.shared, self.database, nodes)

    @property
    def spec_file(self) -> Path:
        """The file with the spec, which exists only in the folder of a cluster."""
        return self.folder / SPEC_FILE

    def read_spec(self) -> ClusterSpec:
        """Return the spec of the running cluster; NotFoundError if none is up, ToolkitError if it has another name."""
        try:
            fields = json.loads(self.spec_file.read_text())
        except FileNotFoundError:
            fix = "run toolkit devcluster " + ("" if self.name == DEFAULT_NAME else f"--name {self.name} ") + "up"
            message = f"the dev cluster {self.name!r} is not up"
            raise NotFoundError(message, where=str(self.folder), fix=fix) from None
        name = fields.pop("name")
        if name != self.name:
            raise ToolkitError(
                f"this folder belongs to the dev cluster {name!r}", where=str(self.folder), fix=f"use --name {name}"
            )
        return ClusterSpec(**{**fields, "options": tuple(fields["options"])})

    def write_spec(self, spec: ClusterSpec) -> None:
        self.spec_file.write_text(json.dumps({"name": self.name, **asdict(spec)}, indent=1) + "\n")


def layout_beside(name: str) -> Layout:
    """Return the layout of another cluster, which must be in its default folder, ~/.toolkit/NAME."""
    return make_layout(name, Path.home() / ".toolkit" / name)


def require_shared(folder: Path, fix: str) -> None:
    """Raise a ToolkitError if each node has its own copy of the folder."""
    if any(folder.is_relative_to(private) for private in ("/tmp", "/dev", "/proc", "/sys")):
        raise ToolkitError(
            "expected a shared folder, but each node has its own /tmp, /dev, /proc and /sys", where=str(folder), fix=fix
        )


def make_layout(name: str = DEFAULT_NAME, folder: Path | None = None) -> Layout:
    """Return the layout of cluster `name` in `folder`, by default $TOOLKIT_DEVCLUSTER or ~/.toolkit/NAME."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise ToolkitError(
            f"{name!r} is not a valid cluster name", fix="use the characters a-z, 0-9 and '-', and start with a letter"
        )
    if folder is None:
        from_environment = os.environ.get(FOLDER_VARIABLE)
        folder = Path(from_environment) if from_environment else Path.home() / ".toolkit" / name
    folder = folder.expanduser().absolute()
    fix = f"choose another folder with --folder or ${FOLDER_VARIABLE}"
    require_shared(folder, fix)
    if len(str(folder)) > LONGEST_FOLDER or re.search(r"[^\w./-]", str(folder)):
        raise ToolkitError(
            f"expected a path of at most {LONGEST_FOLDER} characters from A-Z a-z 0-9 _ . / -",
            where=str(folder),
            fix=fix,
        )
    return Layout(name, folder)
