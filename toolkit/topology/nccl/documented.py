"""Every variable that NCCL's page documents, as data.

One line each: name | since | kind | form | default | what became of it | what it does. The facts are those of the page
up to NCCL 2.32, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, and of its archived versions; where
the page names no version, the first library that has the name. NCCL_PSK stands on the page, and not in 2.32.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

from toolkit.topology.nccl.undocumented import undocumented
from toolkit.topology.nccl.variable import Kind, State, Variable, Version

NEWEST: Version = (2, 32)  # what the table knows; a later NCCL may have more
_TABLE = """
NCCL_SOCKET_IFNAME||system|interfaces|||chooses the IP interfaces
NCCL_SOCKET_FAMILY||system|word:AF_INET/AF_INET6|||forces IPv4 or IPv6
NCCL_SOCKET_MAGIC|2.32|system|number|||the number by which sockets know those of their own job
NCCL_SOCKET_RETRY_CNT|2.24|system|1..|34||how often a connection is tried again
NCCL_SOCKET_RETRY_SLEEP_MSEC|2.24|system|1..|100||how long to wait before the next try
NCCL_SOCKET_POLL_TIMEOUT_MSEC|2.28|system|0..|0||how long to poll a socket while processes find each other
NCCL_PSK|2.33|system|secret|||the key that encrypts NCCL's TCP traffic
NCCL_SOCKET_NTHREADS|2.4.8|system|1..16|1||threads for each connection over sockets
NCCL_NSOCKS_PERTHREAD|2.4.8|system|1..|1||sockets of each such thread
NCCL_CROSS_NIC||system|0..2|2||whether a ring may use one NIC on this node and another on the next
NCCL_IB_HCA||system|adapters|||chooses the InfiniBand or RoCE adapters
NCCL_IB_RAIL_POLICY|2.30.5|system|word:NONE/CX9/CX9:FLIP/CX9:ALT/CX9:BLOCK|CX9||how rails are assigned to adapters
NCCL_IB_TIMEOUT||system|0..31|20||how long an adapter waits for an answer, 4.096 us * 2^value
NCCL_IB_RETRY_CNT|2.1.15|system|0..7|7||how often an adapter sends again
NCCL_IB_GID_INDEX|2.1.4|system|-1..255|-1||the entry of the table of addresses that RoCE uses
NCCL_IB_ADDR_FAMILY|2.21|system|word:AF_INET/AF_INET6|AF_INET||the family of the RoCE address that NCCL chooses itself
NCCL_IB_ADDR_RANGE|2.21|system|cidr|||the range of the RoCE address that NCCL chooses itself
NCCL_IB_ROCE_VERSION_NUM|2.21|system|1..2|2||the RoCE version of the address that NCCL chooses itself
NCCL_IB_PKEY|2.1.4|system|0..|0||the entry of the table of partition keys
NCCL_IB_PKEY_VALUE|2.31|system|-1..65535|-1||the partition key itself
NCCL_IB_SL|2.1.4|system|0..15|0||InfiniBand's service level
NCCL_IB_TC|2.1.15|system|0..255|0||InfiniBand's traffic class
NCCL_IB_FIFO_TC|2.22.3|system|0..255|||the traffic class of control messages
NCCL_IB_RETURN_ASYNC_EVENTS|2.23|system|0..1|1||whether fatal events of an adapter end its communication
NCCL_IB_EVENT_BASED_LB|2.31|system|0..1|0||splits messages by the current speed of the parts of an adapter
NCCL_OOB_NET_ENABLE|2.23|system|0..1|0||processes find each other over NCCL's network in place of sockets
NCCL_OOB_NET_IFNAME|2.23|system|text|||chooses the device for that
NCCL_UID_STAGGER_THRESHOLD|2.23|system|1..|256||from how many ranks on they call rank 0 one after the other
NCCL_UID_STAGGER_RATE|2.23|system|1..|7000||how many of them call in a second
NCCL_NET|2.10|system|text|||forces one network; without it a job ends
NCCL_NET_PLUGIN|2.11|system|text|||the network's plugin
NCCL_GIN_PLUGIN|2.29.3|system|text|||the plugin of networking that GPUs start
NCCL_RMA_PLUGIN|2.30.7|system|text|||the plugin of one-sided operations
NCCL_TUNER_PLUGIN|2.19|system|text|||the tuner's plugin
NCCL_PROFILER_PLUGIN|2.23|system|text|||the profiler's plugin
NCCL_ENV_PLUGIN|2.28|system|text|||the plugin that reads the environment
NCCL_IGNORE_CPU_AFFINITY|2.4.6|system|0..1|0||goes by the GPU's processors, not by those that the launcher gave
NCCL_CONF_FILE|2.23|system|file|||a file of such variables
NCCL_DEBUG||system|word:VERSION/WARN/ATTN/INFO/ABORT/TRACE|||what NCCL prints
NCCL_DEBUG_LEVELS|2.32|system|list:VERSION/WARN/ATTN/INFO/ABORT/TRACE/ALL|||what it prints beside that
NCCL_DEBUG_FILE|2.2.12|system|file|||where it prints
NCCL_DEBUG_SUBSYS|2.3.4|system|subsystems|INIT,BOOTSTRAP,ENV||of what INFO prints
NCCL_DEBUG_TIMESTAMP_FORMAT|2.26|system|text|||the form of times in what it prints
NCCL_DEBUG_TIMESTAMP_LEVELS|2.26|system|list:VERSION/WARN/ATTN/INFO/ABORT/TRACE/ALL|WARN,ATTN||which lines have a time
NCCL_COLLNET_ENABLE|2.6|system|0..1|0||uses the CollNet plugin, reductions in the switches
NCCL_COLLNET_NODE_THRESHOLD|2.9.9|system|0..|2||from how many nodes on CollNet is used
NCCL_CTA_POLICY|2.27|system|policies|DEFAULT||how much of a GPU NCCL takes
NCCL_NETDEVS_POLICY|2.28|system|netdevs|||how many NICs a GPU uses
NCCL_MULTI_RANK_GPU_ENABLE|2.30|system|0..1|0||lets several ranks use one GPU; experimental
NCCL_TOPO_FILE|2.6|system|file|||a topology that is read before NCCL looks itself
NCCL_TOPO_DUMP_FILE|2.6|system|file|||where the topology that was found is written
NCCL_SET_THREAD_NAME|2.12|system|0..1|0||gives NCCL's threads names
NCCL_P2P_DISABLE||debug|0..1|0||switches off direct access between GPUs, over NVLink and PCI
NCCL_P2P_LEVEL|2.3.4|tuning|level:LOC/NVL/PIX/PXB/PHB/SYS|||the greatest distance of direct access between GPUs
NCCL_P2P_DIRECT_DISABLE||debug|0..1|0||switches off direct access to users' buffers
NCCL_SHM_DISABLE||debug|0..1|0||switches off transport through shared memory
NCCL_BUFFSIZE||tuning|bytes|4194304||the size of a buffer between two GPUs
NCCL_NTHREADS||tuning|64/128/256/512|||threads of a block of NCCL's kernels
NCCL_MAX_NCHANNELS|2.5|tuning|1..||deprecated 2.17 NCCL_MAX_CTAS|the most channels
NCCL_MIN_NCHANNELS|2.5|tuning|1..||deprecated 2.17 NCCL_MIN_CTAS|the fewest channels
NCCL_MAX_NRINGS|2.0.5|tuning|1..||deprecated 2.5 NCCL_MAX_CTAS|the most rings
NCCL_MIN_NRINGS|2.2|tuning|1..||deprecated 2.5 NCCL_MIN_CTAS|the fewest rings
NCCL_CHECKS_DISABLE|2.0.5|debug|0..1|0|removed 2.2.12|switches off checks of arguments, which are off anyway
NCCL_CHECK_POINTERS|2.2.12|debug|0..1|0|deprecated 2.29.7 NCCL_CHECK_MODE|checks pointers at each call
NCCL_CHECK_MODE|2.29.7|debug|word:DEFAULT/DEBUG_LOCAL/DEBUG_GLOBAL|DEFAULT||checks arguments at each call
NCCL_LAUNCH_MODE|2.1|debug|word:PARALLEL/GROUP|PARALLEL||how kernels are launched
NCCL_IB_DISABLE||debug|0..1|0||switches off InfiniBand and RoCE: traffic goes over TCP
NCCL_IB_AR_THRESHOLD|2.6|tuning|bytes|8192||from which size on data may take adaptive routes
NCCL_IB_OOO_RQ|2.30|tuning|0..1|0||takes what arrives out of order
NCCL_IB_QPS_PER_CONNECTION|2.10|tuning|1..128|1||queue pairs of a connection
NCCL_IB_SPLIT_DATA_ON_QPS|2.18|tuning|0..1|0||splits each message over the queue pairs
NCCL_IB_CUDA_SUPPORT||debug|0..1||renamed 2.4 NCCL_NET_GDR_LEVEL|forced GPUDirect RDMA
NCCL_IB_GDR_LEVEL|2.3.4|tuning|gdr:LOC/PIX/PXB/PHB/SYS||renamed 2.4 NCCL_NET_GDR_LEVEL|how far GPUDirect RDMA reaches
NCCL_IB_PCI_RELAXED_ORDERING|2.12|tuning|0..2|2||relaxed ordering on PCI
NCCL_IB_ADAPTIVE_ROUTING|2.16|tuning|0..1|||adaptive routing
NCCL_IB_ECE_ENABLE|2.23|tuning|0..1|1||enhanced connection establishment
NCCL_MEM_SYNC_DOMAIN|2.16|tuning|0..1|1||keeps NCCL's memory barriers apart from those of other kernels
NCCL_CUMEM_ENABLE|2.18|tuning|0..1|||allocates GPU memory with cuMem
NCCL_CUMEM_HOST_ENABLE|2.23|tuning|0..1|||allocates host memory with cuMem
NCCL_NET_GDR_LEVEL|2.3.4|tuning|gdr:LOC/PIX/PXB/PHB/SYS|||the greatest distance of GPUDirect RDMA
NCCL_NET_GDR_C2C|2.26|tuning|0..1|1||GPUDirect RDMA through a processor that is linked to the GPU
NCCL_NET_GDR_READ||tuning|0..1|||GPUDirect RDMA when sending, too
NCCL_GDRCOPY_ENABLE||tuning|0..1|0||GDRCopy for NCCL's control structures
NCCL_GDRCOPY_FIFO_ENABLE||tuning|0..1|1||puts the work queue there
NCCL_GDRCOPY_SYNC_ENABLE||tuning|0..1|1||puts words of synchronisation there
NCCL_GDRCOPY_FLUSH_ENABLE||tuning|0..1|0||flushes by reading there
NCCL_NET_SHARED_BUFFERS|2.8|tuning|0..1|1||one pool of buffers for all peers
NCCL_NET_SHARED_COMMS|2.12|tuning|0..1|1||uses connections again for PXN
NCCL_IGNORE_NET_MISMATCH|2.30|tuning|0..1|1||goes on where nodes have different numbers of NICs
NCCL_IGNORE_COLLNET_MISMATCH|2.30|tuning|0..1|0||goes on where nodes have different numbers of CollNet devices
NCCL_SINGLE_RING_THRESHOLD|2.1|debug|bytes||removed 2.3|up to which size one ring was used
NCCL_LL_THRESHOLD|2.1|debug|bytes||removed 2.5|up to which size the low latency protocol was used
NCCL_TREE_THRESHOLD|2.4|debug|bytes||removed 2.5|up to which size trees were used
NCCL_ALGO|2.5|debug|algorithms|||which algorithms may be used
NCCL_PROTO|2.5|debug|protocols|||which protocols may be used
NCCL_NVB_DISABLE|2.11|debug|0..1|0||switches off NVLink through a GPU between two others
NCCL_PXN_DISABLE|2.12|debug|0..1|0||switches off the way over NVLink to another GPU's NIC
NCCL_P2P_PXN_LEVEL|2.12|tuning|0..2|2||when send and receive take that way
NCCL_PXN_C2C|2.27|tuning|0..1|1||takes that way through a processor that is linked to the GPU
NCCL_RUNTIME_CONNECT|2.22|tuning|0..1|1||connects peers when they first talk
NCCL_GRAPH_REGISTER|2.11|tuning|0..1|1||registers buffers of calls in CUDA graphs
NCCL_LOCAL_REGISTER|2.19|tuning|0..1|1||registers buffers when a program asks for it
NCCL_LEGACY_CUDA_REGISTER|2.24|tuning|0..1|0||registers buffers of cudaMalloc, which may hang
NCCL_WIN_ENABLE|2.27|tuning|0..1|1||registers windows of memory
NCCL_SET_STACK_SIZE|2.9|tuning|0..1|0||sets the stack of CUDA kernels
NCCL_GRAPH_MIXING_SUPPORT|2.13|tuning|0..1|1||calls in CUDA graphs beside others
NCCL_GRAPH_STREAM_ORDERING|2.30|tuning|0..1|1||keeps NCCL's kernels in order while a graph is captured
NCCL_RMA_EAGER_INIT|2.31|tuning|0..1|0||prepares one-sided signals at the start
NCCL_DMABUF_ENABLE|2.13|tuning|0..1|1||registers GPU memory through dma-buf
NCCL_P2P_NET_CHUNKSIZE|2.14|tuning|bytes|131072||the size of messages of send and receive
NCCL_P2P_LL_THRESHOLD|2.14|tuning|bytes|16384||up to which size send and receive use the LL protocol
NCCL_ALLOC_P2P_NET_LL_BUFFERS|2.14|tuning|0..1|0||LL buffers for all connections
NCCL_COMM_BLOCKING|2.14|tuning|0..1|||whether calls block
NCCL_CGA_CLUSTER_SIZE|2.16|tuning|0..8|||blocks of a cluster of NCCL's kernels
NCCL_MAX_CTAS|2.17|tuning|1..64|||the most blocks that NCCL takes of a GPU
NCCL_MIN_CTAS|2.17|tuning|1..64|||the fewest
NCCL_NVLS_ENABLE|2.17|tuning|0..2|2||reductions in NVSwitch
NCCL_IB_MERGE_NICS|2.20|tuning|0..1|1||takes the two ports of a NIC as one device
NCCL_NET_MERGE_POLICY|2.30.5|tuning|word:ALL/RAIL|ALL||which NICs are taken as one device
NCCL_MNNVL_ENABLE|2.21|tuning|0..2|2||NVLink between nodes
NCCL_MNNVL_UUID|2.25|tuning|number|||the name of the NVLink domain
NCCL_MNNVL_CLIQUE_ID|2.23|tuning|number|||splits an NVLink domain
NCCL_RAS_ENABLE|2.24|tuning|0..1|1||the service that answers questions about a running job
NCCL_RAS_ADDR|2.24|tuning|text|localhost:28028||where it listens
NCCL_RAS_TIMEOUT_FACTOR|2.24|tuning|real|1||makes its time-outs longer
NCCL_LAUNCH_ORDER_IMPLICIT|2.26|tuning|0..1|0||orders calls of several communicators as the program makes them
NCCL_LAUNCH_RACE_FATAL|2.26|tuning|0..1|1||ends a program whose threads race for a device
NCCL_IPC_USE_ABSTRACT_SOCKET|2.29|tuning|0..1|1||abstract sockets between the processes of a node
NCCL_SYM_GIN_KERNELS_ENABLE|2.29|tuning|0..1|1||symmetric kernels that use the network
"""


@cache
def variables() -> Mapping[str, Variable]:
    """Every variable that is known, by name: those of the page, then those that NCCL reads in silence."""
    rows = (line.split("|") for line in _TABLE.strip().splitlines())
    documented = {row[0]: _variable(*row) for row in rows}
    return {**{variable.name: variable for variable in undocumented()}, **documented}


def _variable(name: str, since: str, kind: str, form: str, default: str, became: str, does: str) -> Variable:
    state, changed, now = [*became.split(), "", "", ""][:3]
    return Variable(
        name, _version(since), cast(Kind, kind), form, default, does, cast(State, state),
        _version(changed), now,
    )  # fmt: skip


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")) if text else ()
