"""The last step into a Landlock box: what this process may do with files, signals and calls, from here to its end and for all that it
starts. Runs in the keeper's forked child; nothing is waited for.

In: a wish of `sandbox.landlock`. Out: a confined process. Landlock holds files and signals; what it leaves open is refused by a filter of
calls: sockets that lead out of the box, limits and priorities of others, objects that outlive processes, names of the host's files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct

from palestra.sandbox import seccomp
from palestra.sandbox.seccomp import op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers on every machine (include/uapi/asm-generic/unistd.h)."""
PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
SINCE = ((1, (1 << 13) - 1), (2, 1 << 13), (3, TRUNCATE), (5, IOCTL_DEV))
"""Rights on files, with the interface that brought them (include/uapi/linux/landlock.h)."""
NET_SINCE, SCOPES_SINCE = 4, 6
NET, SCOPES = 3, 3
"""TCP bind and connect; abstract sockets and signals."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "get_robust_list": (274, 100),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
"""Name: number on x86_64, on aarch64. The network, unix sockets of the host among it; others' priorities; what outlives a box; news of
the host's files."""
OF_OTHERS: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
"""Allowed on oneself (process 0) only: the kernel lets processes of one user do it to each other."""
BY_PATH: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None),
    "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "setxattrat": (463, 463), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}  # fmt: skip
"""Refused where the box's user owns files out here too: Landlock does not hold modes, owners and times."""
SOCKETPAIR, UTIMENSAT = (53, 199), (280, 88)
DATAGRAM = 2

_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_libc = ctypes.CDLL(None, use_errno=True)


def confine(wish: dict[str, Any]) -> None:
    """Confines this process: `folders` to make, `write` (folders), `read` and `devices` (paths; those that are not there are left out),
    `abi`, `shared_user`, and `pids` (0: not limited here).

    Raises:
        OSError: the kernel refuses.
        ValueError: no table of calls for this machine.
    """
    for folder in wish["folders"]:
        os.makedirs(folder, 0o700, exist_ok=True)
    if wish["pids"]:
        most = tasks_of(os.getuid()) + wish["pids"]
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    enter_domain(wish["abi"], wish["read"], wish["write"], wish["devices"])
    seccomp.put(calls_filter(platform.machine(), shared_user=bool(wish["shared_user"])))
    seccomp.install(inet=False)


def abi() -> int:
    """Version of this kernel's Landlock; 0 where it has none."""
    return max(0, int(_libc.syscall(CREATE_RULESET, None, 0, 1)))


def enter_domain(version: int, read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    """From here on this process reads below `read`, does as it likes below `write`, uses `devices`, and signals nobody outside.

    Raises:
        OSError: the kernel refuses.
    """
    handled = sum(rights for since, rights in SINCE if version >= since)
    attributes = struct.pack(
        "QQQ", handled, NET if version >= NET_SINCE else 0, SCOPES if version >= SCOPES_SINCE else 0
    )
    size = 24 if version >= SCOPES_SINCE else 16 if version >= NET_SINCE else 8
    ruleset = _check(_libc.syscall(CREATE_RULESET, attributes, size, 0), "a Landlock ruleset")
    kept = handled & ~(MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK | IOCTL_DEV)
    of_file = READ_FILE | WRITE_FILE | TRUNCATE
    for paths, rights in ((read, EXECUTE | READ_FILE | READ_DIR), (write, kept), (devices, handled & of_file)):
        for path in paths:
            _allow(ruleset, path, rights)
    _check(_libc.syscall(RESTRICT_SELF, ruleset, 0), "the Landlock domain")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
        rule = struct.pack("=Qi", rights, fd)
        _check(_libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"a Landlock rule for {path}")
    finally:
        os.close(fd)


def calls_filter(machine: str, *, shared_user: bool) -> bytes:
    """Classic BPF that refuses the calls above.

    Raises:
        ValueError: no table for this machine.
    """
    if machine not in seccomp.MACHINES:
        raise ValueError(f"no table of system calls for {machine}; known: {', '.join(seccomp.MACHINES)}")
    column = seccomp.MACHINES.index(machine)
    allow, refuse = op(_RETURN, _ALLOW), op(_RETURN, _REFUSE)
    code = op(_LOAD, 0)
    for table in (REFUSED, BY_PATH) if shared_user else (REFUSED,):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                code += op(_EQUAL, number, 0, 1) + refuse
    for pair in OF_OTHERS.values():
        code += op(_EQUAL, pair[column], 0, 4) + op(_LOAD, 16) + op(_EQUAL, 0, 0, 1) + allow + refuse
    # A pair of datagram sockets can be turned to any socket of the host by its path.
    code += op(_EQUAL, SOCKETPAIR[column], 0, 5) + op(_LOAD, 24) + op(_AND, 0xF)
    code += op(_EQUAL, DATAGRAM, 1, 0) + allow + refuse
    if shared_user:
        # Without a path it is the times of an open file. Both halves of the pointer count.
        code += op(_EQUAL, UTIMENSAT[column], 0, 6) + op(_LOAD, 24) + op(_EQUAL, 0, 0, 3)
        code += op(_LOAD, 28) + op(_EQUAL, 0, 0, 1) + allow + refuse
    return code + allow


def tasks_of(uid: int) -> int:
    """Threads that a user has now."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it ended meanwhile
                continue
    return count


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} was refused: {os.strerror(number)}")
    return result
