"""The paths, network names, addresses and ports of a dev cluster, all derived from its name and folder.

So every command finds the cluster again, and two clusters never conflict.
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
# A path in a socket address has at most 107 characters (unix(7)); the longest socket name here has some 20.
LONGEST_FOLDER = 80


@dataclass(frozen=True)
class ClusterSpec:
    """The options of `up`, stored in the folder.

    `link` is the speed of each node's link in tc's format ("200mbit") or "" for no limit; `subnet` the first three
    bytes of the cluster's /24; `options` are raw `Key=Value` lines for slurm.conf. `accounting_of` is the name of the
    cluster whose slurmdbd keeps this one's accounting too, and `seat` this controller's address in that one's network.
    """

    nodes: int
    gpus: int
    link: str
    accounting: bool
    subnet: str
    options: tuple[str, ...] = ()
    accounting_of: str = ""
    seat: str = ""

    @property
    def has_database(self) -> bool:
        """True if slurmdbd and its database run in this cluster."""
        return self.accounting and not self.accounting_of

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def host_address(self) -> str:
        """This machine's own address on the bridge; it is the login node."""
        return f"{self.subnet}.1"

    def node_address(self, node: str) -> str:
        """The address of `node`: .2 for the controller, .11 for node1."""
        number = 2 if node == CONTROLLER else 10 + int(node.removeprefix("node"))
        return f"{self.subnet}.{number}"


@dataclass(frozen=True)
class Layout:
    """Names and paths of one cluster."""

    name: str
    folder: Path

    @property
    def bridge(self) -> str:
        """Name of the bridge, unique to the folder, and prefix of links: 8 of Linux' 15 characters."""
        return f"tkdc{self._number & 0xFFFF:04x}"

    def link(self, node: str) -> str:
        """The host's end of the cable to `node`."""
        return self.bridge + ("c" if node == CONTROLLER else f"n{node.removeprefix('node')}")

    def link_to_accounting(self) -> str:
        """This machine's end of the controller's second cable, to the network of the cluster that keeps its accounting."""
        return self.bridge + "a"

    @property
    def first_port(self) -> int:
        """The first of ten ports, below Linux' range of ephemeral ports (32768 up)."""
        return 20000 + self._number % 1200 * 10

    @property
    def first_subnet(self) -> int:
        """Number of the first 10.x.y.0/24 to try in the search for a free one, in [0, 2**14)."""
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
        """A folder that every node sees, since nodes have their own /tmp."""
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
        """A file that exists only in the folder of a cluster."""
        return self.folder / SPEC_FILE

    def read_spec(self) -> ClusterSpec:
        """The spec of the running cluster; NotFoundError if none is up, ToolkitError for another name."""
        try:
            fields = json.loads(self.spec_file.read_text())
        except FileNotFoundError:
            fix = "toolkit devcluster " + ("" if self.name == DEFAULT_NAME else f"--name {self.name} ") + "up"
            message = f"the dev cluster {self.name!r} is not up"
            raise NotFoundError(message, where=str(self.folder), fix=fix) from None
        name = fields.pop("name")
        if name != self.name:
            raise ToolkitError(
                f"this is the folder of the dev cluster {name!r}", where=str(self.folder), fix=f"--name {name}"
            )
        return ClusterSpec(**{**fields, "options": tuple(fields["options"])})

    def write_spec(self, spec: ClusterSpec) -> None:
        self.spec_file.write_text(json.dumps({"name": self.name, **asdict(spec)}, indent=1) + "\n")


def layout_beside(name: str) -> Layout:
    """The layout of another cluster that is known only by its name, in ~/.toolkit/NAME."""
    return make_layout(name, Path.home() / ".toolkit" / name)


def make_layout(name: str = DEFAULT_NAME, folder: Path | None = None) -> Layout:
    """The layout of cluster `name` in `folder`, else in $TOOLKIT_DEVCLUSTER, else in ~/.toolkit/NAME."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise ToolkitError(
            f"{name!r} is not a valid cluster name", fix="use a-z, 0-9 and '-', starting with one of a-z"
        )
    if folder is None:
        from_environment = os.environ.get(FOLDER_VARIABLE)
        folder = Path(from_environment) if from_environment else Path.home() / ".toolkit" / name
    folder = folder.expanduser().absolute()
    fix = f"choose another folder with --folder or ${FOLDER_VARIABLE}"
    if any(folder.is_relative_to(private) for private in ("/tmp", "/dev", "/proc", "/sys")):
        raise ToolkitError("nodes have a private /tmp, /dev/shm, /proc and /sys", where=str(folder), fix=fix)
    if len(str(folder)) > LONGEST_FOLDER or re.search(r"[^\w./-]", str(folder)):
        raise ToolkitError(
            f"sockets and slurm.conf need a path of at most {LONGEST_FOLDER} plain characters",
            where=str(folder),
            fix=fix,
        )
    return Layout(name, folder)
