"""Which system calls code in a box is refused: one table, as a filter for the kernel and as a profile for Docker.

Out: classic BPF for x86_64 and aarch64, written here, so that no library is needed. What is refused widens the kernel's attack surface or
reaches out of the box, and no ordinary program needs it. Calls of another architecture's numbering end the process. Waits for nothing.
"""

from __future__ import annotations

import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DENIED: dict[str, tuple[int | None, int | None]] = {
    # Reading and writing other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # Key rings, programs in the kernel, counters, rings of requests that filters do not see, pages handled by user code.
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282),
    "memfd_secret": (447, 447), "vmsplice": (278, 75), "lookup_dcookie": (212, 18), "modify_ldt": (154, None),
    # Mounts, roots, namespaces, files by handle.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "setns": (308, 268), "unshare": (272, 97),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # The machine: modules, kernels, clocks, names, ports, placement of memory.
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "create_module": (174, None), "query_module": (178, None), "get_kernel_syms": (177, None),
    "reboot": (169, 142), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "personality": (135, 92), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "migrate_pages": (256, 238), "move_pages": (279, 239), "nfsservctl": (180, 42),
    "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None), "lsm_set_self_attr": (460, 460),
}  # fmt: skip
"""Name: number on x86_64, on aarch64. From the kernel's own tables (arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h)."""

MACHINES = ("x86_64", "aarch64")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
IOCTL = {"x86_64": 16, "aarch64": 29}
SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""socket and socketpair."""
X32 = 0x40000000
"""Bit in the numbers of x86_64's second calling convention, which no table of ours knows."""

NAMESPACES = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone(2) that make a namespace."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: in a network of their own these lead nowhere."""
TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into a terminal for somebody else."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def program(machine: str | None = None, *, inet: bool = True) -> bytes:
    """The filter for this machine, or another; without `inet`, sockets of the internet families are refused too.

    Raises:
        ValueError: no table for such a machine.
    """
    kind = machine or os.uname().machine
    if kind not in MACHINES:
        raise ValueError(f"no seccomp filter for {kind}; there is one for {', '.join(MACHINES)}")
    column = MACHINES.index(kind)
    code = [op(_LOAD, _ARCH), op(_EQUAL, AUDIT[kind], 1, 0), op(_RETURN, _KILL), op(_LOAD, _NUMBER)]
    if kind == "x86_64":
        code += [op(_AT_LEAST, X32, 0, 1), op(_RETURN, _KILL)]
    refused = [numbers[column] for numbers in DENIED.values()]
    code += _refuse([number for number in refused if number is not None], errno.EPERM)
    # glibc falls back to clone, whose flags a filter can read.
    code += _refuse([CLONE3], errno.ENOSYS)
    code += _when(CLONE[kind], [_load_argument(0), op(_ANY_BIT, sum(NAMESPACES), 0, 1), _fail(errno.EPERM)])
    families = FAMILIES if inet else FAMILIES[:1]
    for number in SOCKETS[kind]:
        code += _when(number, [_load_argument(0), *_unless(families), _fail(errno.EAFNOSUPPORT)])
    code += _when(IOCTL[kind], [_load_argument(1), *_refuse(TERMINAL, errno.EPERM)])
    return b"".join([*code, op(_RETURN, _ALLOW)])


def install(*, inet: bool = True) -> None:
    """Puts the filter on this process and all that it will start, for good.

    Raises:
        OSError: the kernel refuses.
        ValueError: no table for this machine.
    """
    put(program(inet=inet))


def put(code: bytes) -> None:
    """Puts a filter on this process, for good.

    Raises:
        OSError: the kernel refuses.
    """
    import ctypes

    text = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused; is CONFIG_SECCOMP_FILTER in this kernel?")


def docker_profile() -> dict[str, Any]:
    """The same table in the form that Docker reads."""
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    family = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EAFNOSUPPORT, "names": ["socket", "socketpair"]}
    rules: list[dict[str, Any]] = [
        {**refuse, "names": list(DENIED)},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    for flag in NAMESPACES:
        rules.append({**refuse, "names": ["clone"], "args": [_argument(0, "SCMP_CMP_MASKED_EQ", flag, flag)]})
    for number in range(max(FAMILIES)):
        if number not in FAMILIES:
            rules.append({**family, "args": [_argument(0, "SCMP_CMP_EQ", number)]})
    rules.append({**family, "args": [_argument(0, "SCMP_CMP_GT", max(FAMILIES))]})
    for request in TERMINAL:
        rules.append({**refuse, "names": ["ioctl"], "args": [_argument(1, "SCMP_CMP_EQ", request)]})
    architectures = [{"architecture": f"SCMP_ARCH_{kind.upper()}", "subArchitectures": []} for kind in MACHINES]
    return {"defaultAction": "SCMP_ACT_ALLOW", "archMap": architectures, "syscalls": rules}


def _argument(index: int, operator: str, value: int, second: int = 0) -> dict[str, Any]:
    return {"index": index, "op": operator, "value": value, "valueTwo": second}


def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """An instruction of classic BPF."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def _load_argument(index: int) -> bytes:
    """Its lower half, on little-endian machines."""
    return op(_LOAD, _ARGUMENT + 8 * index)


def _fail(number: int) -> bytes:
    return op(_RETURN, _ERRNO | number)


def _refuse(values: list[int] | tuple[int, ...], error: int) -> list[bytes]:
    """Fails if what is loaded is one of these."""
    return [part for value in values for part in (op(_EQUAL, value, 0, 1), _fail(error))]


def _unless(values: tuple[int, ...]) -> list[bytes]:
    """Jumps over the next instruction if what is loaded is one of these."""
    return [op(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Runs `body` for this call; what does not fail in it is allowed."""
    return [op(_EQUAL, number, 0, len(body) + 1), *body, op(_RETURN, _ALLOW)]
