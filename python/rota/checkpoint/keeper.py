"""The keeper: a small process that holds a job's checkpoints in a host's memory.

Shared memory dies with its last holder, so the ranks of a host hand their descriptors to a process
that does not die with them. It has a session of its own, which no launcher kills, and is found by
the name of its abstract UNIX socket, of which there can be only one. It never maps the memory and
does not know what is in it. Its messages are packets of JSON, with descriptors:

| request | answer |
|---|---|
| join: protocol, job, meeting, rank, linger_s, launcher, pidfds of rank and launcher | pid |
| owners | the ranks of whose state it holds memory |
| keep: owner, slot, the memory | nothing; the slot's last memory is let go |
| drop: owner, slot | nothing; the slot's memory is let go |
| fetch: owner | slots, and the memory of each |
| left | the ranks that have joined this keeper and have ended or closed since |
| finish | nothing; the rank needs no memory any more |

An answer with "error" refuses the request. A meeting is the store in which the ranks of a job find
each other: the keeper serves one at a time, so that two jobs of one name are told so. It ends, and
the memory with it,

- at once when all ranks that have ever joined have finished, or
- when for linger_s seconds no rank that has joined was alive, and no launcher.

Imports the standard library only, so that it starts in milliseconds and stays small. Ranks start
and use it through link.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

PROTOCOL = 2
# Exit statuses of the process that starts the keeper.
LISTENING, ANOTHER_LISTENS = 0, 3
SLOTS = (0, 1)  # versions that are kept of each rank, in turn
LONGEST_WAIT_S = 86400.0  # at once: the kernel counts milliseconds in 32 bits
FIRST_JOIN_S = 60.0  # how long a keeper waits for the rank that has started it
MAX_PACKET_BYTES = 64 << 10
MAX_DESCRIPTORS = 2  # of one packet
# Nobody can resize memory under a mapping, or add further seals.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def send_packet(connection: socket.socket, content: object, fds: Sequence[int]) -> None:
    socket.send_fds(connection, [json.dumps(content).encode()], fds)


def recv_packet(connection: socket.socket) -> tuple[Any, list[int]]:
    """Content and descriptors, which are closed on exec; None for the content at the end."""
    data, fds, flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet was cut off")
        return (json.loads(data) if data else None), fds
    except ValueError:
        close_all(fds)
        raise


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """pid and uid of whoever connected or listened."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, uid


class Refusal(Exception):
    """What a rank gets instead of an answer; `facts` are for programs."""

    def __init__(self, text: str, **facts: object) -> None:
        super().__init__(text)
        self.facts = facts


class Member:
    """A connection, and the rank behind it once it has joined."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid, self.uid = peer_credentials(connection)
        self.rank: int | None = None
        self.meeting = ""
        self.pidfd = -1  # readable once the rank's process has ended


class Keeper:
    """Answers ranks of a job until nobody needs the memory any more."""

    def __init__(self, listener: socket.socket, job: str) -> None:
        self._job = job
        self._linger_s = FIRST_JOIN_S
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._memories: dict[tuple[int, int], int] = {}  # descriptors by owner and slot
        self._members: dict[int, Member] = {}  # alive, by rank
        self._launchers: dict[int, int] = {}  # pidfds of living ones, by pid
        self._left: set[int] = set()
        self._finished: set[int] = set()
        self._alone_since = time.monotonic()

    def run(self) -> None:
        while True:
            left_s = self._seconds_left()
            if left_s is not None and left_s <= 0:
                return
            wait_s = None if left_s is None else min(left_s, LONGEST_WAIT_S)
            for key, _ in self._selector.select(wait_s):
                if self._selector.get_map().get(key.fd) is key:  # not closed by an earlier event
                    key.data()

    # None as long as anybody is alive.
    def _seconds_left(self) -> float | None:
        if self._finished and not self._members and not self._left - self._finished:
            return 0.0
        if self._members or self._launchers:
            self._alone_since = time.monotonic()
            return None
        return self._alone_since + self._linger_s - time.monotonic()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone already, or out of descriptors; then it stays in the backlog
            time.sleep(0.01)
            return
        member = Member(connection)
        if member.uid != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)  # nobody can keep the others waiting
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(member))

    def _serve(self, member: Member) -> None:
        try:
            request, fds = recv_packet(member.connection)
        except (OSError, ValueError):
            request, fds = None, []
        if request is None:
            self._forget(member)
            return
        answer: dict[str, Any]
        answer_fds: list[int] = []
        try:
            answer, answer_fds = self._answer(member, request, fds)
        except Refusal as refusal:
            answer = {"error": str(refusal), **refusal.facts}
        except (KeyError, TypeError, ValueError, IndexError, OSError) as error:
            answer = {"error": f"the keeper does not understand {request!r} ({error!r})"}
        finally:
            close_all(fds)  # what was taken over is not in it any more
        try:
            send_packet(member.connection, answer, answer_fds)
        except OSError:
            self._forget(member)

    # Takes descriptors that it keeps out of `fds`.
    def _answer(
        self, member: Member, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        ask = request["ask"]
        if ask == "join":
            return self._join(member, request, fds), []
        if member.rank is None:
            raise Refusal("join first")
        if ask == "owners":
            return {"owners": sorted({owner for owner, _ in self._memories})}, []
        if ask in ("keep", "drop"):
            owner, slot = int(request["owner"]), int(request["slot"])
            if slot not in SLOTS:
                raise Refusal(f"slot is {slot}, expected one of {SLOTS}")
            if ask == "keep":
                fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)  # OSError for anything but a memfd
            last = self._memories.pop((owner, slot), None)
            if last is not None:
                os.close(last)
            if ask == "keep":
                self._memories[owner, slot] = fds.pop(0)
            return {}, []
        if ask == "fetch":
            owner = int(request["owner"])
            slots = [slot for slot in SLOTS if (owner, slot) in self._memories]
            return {"slots": slots}, [self._memories[owner, slot] for slot in slots]
        if ask == "left":
            return {"left": sorted(self._left)}, []
        if ask == "finish":
            self._finished.add(member.rank)
            return {}, []
        raise Refusal(f"the keeper does not know {ask!r}")

    def _join(self, member: Member, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if request["protocol"] != PROTOCOL:
            raise Refusal(
                f"the keeper (pid {os.getpid()}) speaks protocol {PROTOCOL}, this rank "
                f"{request['protocol']}; do all processes run the same version of rota?"
            )
        if request["job"] != self._job:
            raise Refusal(
                f"the keeper (pid {os.getpid()}) is that of job {self._job!r}, this rank belongs "
                f"to {request['job']!r}"
            )
        if member.rank is not None:
            raise Refusal(f"this connection is that of rank {member.rank}")
        rank, meeting = int(request["rank"]), str(request["meeting"])
        for other in self._members.values():
            if other.meeting != meeting:
                raise Refusal(
                    f"another job on this host has the same name, of which rank {other.rank} is "
                    f"pid {other.pid}: its ranks meet in another store; give each job a name of "
                    f"its own, by torchrun's --rdzv-id or by job=",
                    holder=other.pid,
                )
        holder = self._members.get(rank)
        if holder is not None:
            raise Refusal(
                f"rank {rank} is pid {holder.pid}; give each process a rank of its own",
                holder=holder.pid,
            )
        self._linger_s = float(request["linger_s"])
        member.rank, member.meeting = rank, meeting
        member.pidfd = fds.pop(0)
        self._selector.register(member.pidfd, selectors.EVENT_READ, lambda: self._forget(member))
        self._members[rank] = member
        self._left.discard(rank)
        self._finished.discard(rank)
        if fds:
            self._watch_launcher(int(request["launcher"]), fds.pop(0))
        return {"pid": os.getpid()}

    def _watch_launcher(self, pid: int, pidfd: int) -> None:
        self._forget_launcher(pid)
        self._launchers[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._forget_launcher(pid))

    def _forget_launcher(self, pid: int) -> None:
        pidfd = self._launchers.pop(pid, -1)
        if pidfd >= 0:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _forget(self, member: Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
        if member.rank is None:
            return
        self._selector.unregister(member.pidfd)
        os.close(member.pidfd)
        del self._members[member.rank]
        self._left.add(member.rank)


def main(name: str, job: str) -> int:
    """Returns once the keeper listens; the keeper goes on in a process of its own."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return ANOTHER_LISTENS
        raise
    listener.listen(128)
    if os.fork() != 0:
        return LISTENING
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    with contextlib.suppress(KeyboardInterrupt):
        Keeper(listener, job).run()
    return 0


if __name__ == "__main__":
    # Without the interpreter's own end, which the process that started it need not wait for.
    status = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
