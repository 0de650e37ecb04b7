"""Asynchronous collectives: each call starts the operation and returns a handle. communicator.py has the synchronous ones."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from toolkit.comm import reductions
from toolkit.comm.algorithms import find_algorithm
from toolkit.comm.buckets import Buckets
from toolkit.comm.compat import all_gather_single
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.cost.choice import Choice
from toolkit.comm.handle import Handle
from toolkit.comm.issuer import Issuer
from toolkit.comm.one_hop import direct_reduce_scatter
from toolkit.comm.peers import Peers, as_bytes
from toolkit.comm.reductions import plain
from toolkit.comm.tree import tree_broadcast, tree_reduce
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable
from toolkit.errors import ToolkitError

T = TypeVar("T")
_BETWEEN_TWO = 1  # message tag of send and receive, which separates them from the messages of collectives


class AsynchronousCollectives:
    """The type of `Communicator.start`: the methods of the communicator, but each returns a handle."""

    def __init__(self, peers: Peers, issuer: Issuer, backend: Callable[[torch.device], str]) -> None:
        """Run collectives of `peers` through `issuer`; `backend` returns the name of a device's backend, for errors."""
        self._peers = peers
        self._issuer = issuer
        self._backend = backend
        self.choice: Choice | None = None  # the algorithms that "fastest" selects
        self._compressed_calls = 0

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "flat",
        compression: str | GradientCompressionTable | None = None,
    ) -> Handle[torch.Tensor]:
        """Reduce `tensor` in place; the handle returns `tensor`."""
        reductions.check_reducible(tensor.dtype, op, self._backend(tensor.device))
        if compression is not None:
            return self._all_reduce_compressed(tensor, op, compression)
        if algorithm == "fastest":
            algorithm = self._fastest(tensor)
        run = find_algorithm(algorithm, self._peers).run

        def work() -> torch.Tensor:
            data = reductions.to_working(tensor, op, self._peers.size)
            if data.numel() and self._peers.size > 1:
                run(data, _left(op), self._peers)
            if reductions.overflows(data, tensor.dtype, op):
                raise reductions.overflow_error(tensor.dtype, op, self._peers.size)
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(reductions.from_working(data, tensor.dtype, op).view(tensor.shape))
            return tensor

        return self._issuer.start(f"all-reduce ({algorithm})", [tensor], work)

    def _all_reduce_compressed(
        self, tensor: torch.Tensor, op: str, compression: str | GradientCompressionTable
    ) -> Handle[torch.Tensor]:
        if op not in ("sum", "avg") or not tensor.is_floating_point():
            raise ToolkitError(
                f"expected a sum or an average of floats to compress, got {op!r} of {tensor.dtype}",
                fix="use op 'avg' or 'sum' with a float type, or compression=None",
            )
        settings = _table_of(compression)
        self._compressed_calls += 1
        reducer = GradientCompression(settings, {"tensor": tensor}, seed=self._compressed_calls)

        def work() -> torch.Tensor:
            reducer.reduce(["tensor"], [tensor.detach()], self._peers)
            return tensor.mul_(self._peers.size) if op == "sum" else tensor

        return self._issuer.start(f"all-reduce ({settings.algorithm})", [tensor], work)

    def reduce_compressed(
        self, compression: GradientCompression, names: Sequence[str], gradients: Sequence[torch.Tensor]
    ) -> Handle[None]:
        """Average gradients in place, by `compression`, which keeps residuals from call to call."""
        kind = f"gradient reduction ({compression.settings.algorithm})"
        return self._issuer.start(kind, gradients, lambda: compression.reduce(names, gradients, self._peers))

    def _fastest(self, tensor: torch.Tensor) -> str:
        if self.choice is None:
            raise ToolkitError(
                "algorithm 'fastest' requires a measurement of the links",
                fix="call communicator.choose_by_measurement() first",
            )
        return self.choice.algorithm(tensor.nbytes)

    def buckets(self, op: str = "sum", algorithm: str = "flat", bucket_bytes: int | None = None) -> Buckets:
        """Return buckets that all-reduce the tensors which the caller adds one by one, as gradients become ready."""
        return Buckets(lambda packed: self.all_reduce(packed, op, algorithm), bucket_bytes)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", lengths: Sequence[int] | None = None
    ) -> Handle[torch.Tensor]:
        """Reduce and return this rank's part along dimension 0."""
        reductions.check_reducible(tensor.dtype, op, self._backend(tensor.device))
        parts_lengths = self._lengths(tensor, lengths)
        row = tensor[:1].numel() if tensor.shape[0] else 0

        def work() -> torch.Tensor:
            working = reductions.to_working(tensor, op, self._peers.size)
            wide = working.numel() // max(tensor.numel(), 1)  # 2 if complex: reduced as two real numbers
            parts = list(working.split([length * row * wide for length in parts_lengths]))
            parts[self._peers.place] = parts[self._peers.place].clone()
            part = direct_reduce_scatter(parts, _left(op), self._peers)
            self._agree_on_overflow(part, tensor.dtype, op)
            return reductions.from_working(part, tensor.dtype, op).view(
                parts_lengths[self._peers.place], *tensor.shape[1:]
            )

        return self._issuer.start("reduce-scatter (direct)", [tensor], work)

    def reduce(self, tensor: torch.Tensor, root: int, op: str = "sum") -> Handle[torch.Tensor | None]:
        """Reduce to the root; the handle returns None on the other ranks."""
        reductions.check_reducible(tensor.dtype, op, self._backend(tensor.device))
        self._check_rank(root)

        def work() -> torch.Tensor | None:
            data = reductions.to_working(tensor, op, self._peers.size)
            data = data.clone() if data.data_ptr() == tensor.data_ptr() else data
            tree_reduce(data, _left(op), self._peers, root)
            at_root = self._peers.place == root
            self._agree_on_overflow(data if at_root else data[:0], tensor.dtype, op)
            return reductions.from_working(data, tensor.dtype, op).view(tensor.shape) if at_root else None

        return self._issuer.start("reduce (tree)", [tensor], work)

    def all_gather(self, tensor: torch.Tensor) -> Handle[torch.Tensor]:
        """Concatenate the tensors of all ranks along dimension 0."""

        def work() -> torch.Tensor:
            own = as_bytes(plain(tensor))
            joined = own.new_empty(self._peers.size * own.numel())
            if self._peers.size == 1:
                joined.copy_(own)
            elif own.numel():
                all_gather_single(joined, own, group=self._peers.group)
            rows = self._peers.size * (tensor.shape[0] if tensor.dim() else 1)
            return joined.view(tensor.dtype).view(rows, *tensor.shape[1:])

        return self._issuer.start("all-gather (flat)", [tensor], work)

    def all_gather_unequal(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Gather the tensors of all ranks, which may have different lengths along dimension 0."""
        return self._issuer.start("all-gather (direct)", [tensor], lambda: self._gather_unequal(tensor, None))

    def gather(self, tensor: torch.Tensor, root: int) -> Handle[list[torch.Tensor] | None]:
        """Gather the tensors of all ranks on the root; lengths along dimension 0 may differ."""
        self._check_rank(root)

        def work() -> list[torch.Tensor] | None:
            gathered = self._gather_unequal(tensor, root)
            return gathered if self._peers.place == root else None

        return self._issuer.start("gather (direct)", [tensor], work)

    def scatter(self, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        """Send one of the root's tensors to each rank."""
        self._check_rank(root)
        if self._peers.place == root:
            self._check_scattered(tensors, like)

        def work() -> torch.Tensor:
            own = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            if self._peers.place != root:
                self._peers.exchange(receives=[(own, root)])
                return own
            assert tensors is not None
            others = [place for place in range(self._peers.size) if place != root]
            self._peers.exchange([(plain(tensors[place]), place) for place in others])
            return own.copy_(tensors[root].detach())

        return self._issuer.start("scatter (direct)", [like, *(tensors or ())], work)

    def all_to_all(self, tensor: torch.Tensor) -> Handle[torch.Tensor]:
        """Send the i-th of equal parts along dimension 0 to rank i, and concatenate the received parts."""
        self._lengths(tensor, None)

        def work() -> torch.Tensor:
            data = plain(tensor)
            joined = torch.empty_like(data)
            if self._peers.size == 1:
                joined.copy_(data)
            elif data.numel():
                dist.all_to_all_single(as_bytes(joined), as_bytes(data), group=self._peers.group)
            return joined

        return self._issuer.start("all-to-all (flat)", [tensor], work)

    def all_to_all_unequal(self, tensor: torch.Tensor, lengths: Sequence[int]) -> Handle[list[torch.Tensor]]:
        """Send parts of these lengths along dimension 0 to the ranks, and return the part received from each rank."""
        parts_lengths = self._lengths(tensor, lengths)

        def work() -> list[torch.Tensor]:
            parts = plain(tensor).split(parts_lengths)
            sent = torch.tensor([[length, _form(tensor)] for length in parts_lengths], device=tensor.device)
            announced = torch.empty_like(sent)
            if self._peers.size > 1:
                dist.all_to_all_single(announced, sent, group=self._peers.group)
            else:
                announced.copy_(sent)
            received = self._receive_buffers(announced, tensor)
            return self._swap(parts, received)

        return self._issuer.start("all-to-all (direct)", [tensor], work)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        """Copy the root's tensor to all ranks, in place."""
        self._check_rank(root)
        return self._issuer.start("broadcast (tree)", [tensor], lambda: self._broadcast([tensor], [root])[0])

    def broadcast_many(self, tensors: Sequence[torch.Tensor], roots: Sequence[int]) -> Handle[list[torch.Tensor]]:
        """Copy each tensor from its own root to all ranks concurrently, in place."""
        if len(tensors) != len(roots):
            raise ToolkitError(f"got {len(tensors)} tensors, but {len(roots)} roots", fix="pass one root per tensor")
        for root in roots:
            self._check_rank(root)
        return self._issuer.start("broadcast (trees)", tensors, lambda: self._broadcast(tensors, roots))

    def send(self, tensor: torch.Tensor, to: int) -> Handle[None]:
        """Send to one rank, which must call `receive`."""
        self._check_other(to)
        peers = replace(self._peers, tag=_BETWEEN_TWO)
        return self._issuer.start_between_two(
            f"send to rank {to}", to, [tensor], lambda: peers.exchange([(plain(tensor), to)])
        )

    def receive(self, tensor: torch.Tensor, source: int) -> Handle[torch.Tensor]:
        """Receive into `tensor` from one rank; both ranks must use the same shape and type."""
        self._check_other(source)
        peers = replace(self._peers, tag=_BETWEEN_TWO)

        def work() -> torch.Tensor:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            peers.exchange(receives=[(room, source)])
            tensor.detach().copy_(room)
            return tensor

        return self._issuer.start_between_two(f"receive from rank {source}", source, [tensor], work)

    def barrier(self) -> Handle[None]:
        """Return a handle that is done when every rank has entered the barrier."""

        def work() -> None:
            if self._peers.size > 1:
                dist.all_reduce(torch.zeros(1, dtype=torch.uint8), group=self._peers.group)

        return self._issuer.start("barrier", [], work)

    def _broadcast(self, tensors: Sequence[torch.Tensor], roots: Sequence[int]) -> list[torch.Tensor]:
        rooms = [plain(tensor) for tensor in tensors]
        tree_broadcast(rooms, roots, self._peers)
        for tensor, room in zip(tensors, rooms, strict=True):
            if room.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(room)
        return list(tensors)

    def _gather_unequal(self, tensor: torch.Tensor, root: int | None) -> list[torch.Tensor]:
        """Return the tensors of all ranks on `root` (None: on every rank); other ranks get only their own tensor."""
        if tensor.dim() == 0:
            tensor = tensor.view(1)
        announced = torch.tensor([[tensor.shape[0], _form(tensor)]] * self._peers.size, device=tensor.device)
        if self._peers.size > 1:
            all_gather_single(announced, announced[:1].clone(), group=self._peers.group)
        wanted = range(self._peers.size) if root is None or root == self._peers.place else [self._peers.place]
        for place in range(self._peers.size):
            if place not in wanted:
                self._check_form(place, announced[place], tensor)
                announced[place, 0] = 0
        received = self._receive_buffers(announced, tensor)
        own, nothing = plain(tensor), plain(tensor[:0])
        return self._swap(
            [own if root in (None, place) else nothing for place in range(self._peers.size)], received, own
        )

    def _receive_buffers(self, announced: torch.Tensor, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return receive buffers, one for each row (length, form) that a rank announced."""
        for place, line in enumerate(announced):
            self._check_form(place, line, tensor)
        lengths = announced[:, 0].tolist()
        return [torch.empty((n, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device) for n in lengths]

    def _check_form(self, place: int, line: torch.Tensor, tensor: torch.Tensor) -> None:
        if int(line[1]) != _form(tensor):
            raise ToolkitError(
                f"expected {tensor.dtype} of shape (n, {', '.join(map(str, tensor.shape[1:]))}), as on rank "
                f"{self._peers.place} of the group, got another type or other trailing dimensions from rank {place} of the group",
                fix="pass tensors that differ only in their first dimension",
            )

    def _swap(
        self, sent: Sequence[torch.Tensor], received: list[torch.Tensor], own: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        here = self._peers.place
        others = [place for place in range(self._peers.size) if place != here]
        self._peers.exchange([(sent[place], place) for place in others], [(received[place], place) for place in others])
        received[here].copy_(sent[here] if own is None else own)
        return received

    def _agree_on_overflow(self, part: torch.Tensor, dtype: torch.dtype, op: str) -> None:
        """Raise an error on all ranks if the part of one rank overflows, so that no rank continues alone."""
        if not reductions.may_overflow(dtype, op):
            return
        found = torch.tensor([reductions.overflows(part, dtype, op)], dtype=torch.uint8, device=part.device)
        if self._peers.size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._peers.group)
        if found.item():
            raise reductions.overflow_error(dtype, op, self._peers.size)

    def _lengths(self, tensor: torch.Tensor, lengths: Sequence[int] | None) -> list[int]:
        size = self._peers.size
        rows = tensor.shape[0] if tensor.dim() else 0
        if tensor.dim() == 0:
            raise ToolkitError("a tensor without dimensions cannot be split among ranks", fix="pass tensor.view(1)")
        if lengths is None:
            if rows % size:
                raise ToolkitError(
                    f"{rows} rows are not divisible by {size} ranks",
                    fix="pad the rows, or pass the lengths of unequal parts",
                )
            return [rows // size] * size
        if len(lengths) != size or sum(lengths) != rows or min(lengths) < 0:
            raise ToolkitError(
                f"lengths {list(lengths)} do not split {rows} rows among {size} ranks",
                fix=f"pass {size} lengths, none below 0, with the sum {rows}",
            )
        return list(lengths)

    def _check_scattered(self, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor) -> None:
        if tensors is None or len(tensors) != self._peers.size:
            given = "none" if tensors is None else str(len(tensors))
            raise ToolkitError(
                f"expected {self._peers.size} tensors to scatter, one per rank, got {given}",
                fix="pass one tensor for each rank",
            )
        for place, tensor in enumerate(tensors):
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise ToolkitError(
                    f"expected {like.dtype} of shape {tuple(like.shape)} for rank {place}, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}",
                    fix="scatter tensors with the dtype and shape of `like`",
                )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._peers.size:
            raise ToolkitError(f"expected a rank from 0 to {self._peers.size - 1}, got {rank}", fix="pass a group rank")

    def _check_other(self, rank: int) -> None:
        self._check_rank(rank)
        if rank == self._peers.place:
            raise ToolkitError(f"rank {rank} cannot send to or receive from itself", fix="copy the tensor instead")


def _table_of(compression: str | GradientCompressionTable) -> GradientCompressionTable:
    name = compression if isinstance(compression, str) else compression.algorithm
    known = [one for one in ALGORITHMS if one != "auto"]  # which compares the times of many calls
    if name not in known:
        raise ToolkitError(f"unknown compression {name!r}", fix=f"use one of {', '.join(known)}")
    if isinstance(compression, str):
        compression = GradientCompressionTable.model_validate({"algorithm": name, "min_elements": 1})
    # No later call could add what this one loses.
    return compression.model_copy(update={"error_feedback": "off"}) if compression.has_feedback else compression


def _left(op: str) -> str:
    """Return the op to perform: a sum for averages, whose inputs are already divided."""
    return "sum" if op == "avg" else op


def _form(tensor: torch.Tensor) -> int:
    """Return a checksum of the dtype and the dimensions after the first, which must be equal on all ranks."""
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
