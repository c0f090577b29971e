"""What every probe's code begins with, in the box: telling what was tried, and system calls by name. Standard library of Python 3.9."""

from __future__ import annotations

from palestra.sandbox.types import ExecResult

NUMBERS = {
    "x86_64": {
        "ptrace": 101, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249, "process_vm_readv": 310,
        "open_by_handle_at": 304, "reboot": 169, "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176,
        "swapon": 167, "acct": 163, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "sethostname": 170, "clone": 56,
        "shmget": 29, "semget": 64, "msgget": 68, "syslog": 103, "kcmp": 312, "fanotify_init": 300, "mknodat": 259, "capget": 125,
    },
    "aarch64": {
        "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218, "process_vm_readv": 270,
        "open_by_handle_at": 265, "reboot": 142, "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106,
        "swapon": 224, "acct": 89, "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "sethostname": 161, "clone": 220,
        "shmget": 194, "semget": 190, "msgget": 186, "syslog": 116, "kcmp": 272, "fanotify_init": 262, "mknodat": 33, "capget": 90,
    },
}  # fmt: skip
"""System calls by name, from the kernel's tables of both architectures."""

EVERYWHERE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "fspick": 433, "pidfd_open": 434,
    "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
"""Those that have one number on all architectures."""

PRELUDE = f"""
import errno, os, sys, time
NUMBERS, EVERYWHERE = {NUMBERS!r}, {EVERYWHERE!r}
def tell(name, word):
    os.write(1, ("\\n@%s=%s\\n" % (name, word)).encode())
def word(error):
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
def attempt(name, act):
    try:
        act()
    except OSError as error:
        tell(name, word(error))
    else:
        tell(name, "DONE")
def call(name, *arguments):
    import ctypes
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    number = EVERYWHERE.get(name) or NUMBERS[os.uname().machine][name]
    made = [each if isinstance(each, (bytes, ctypes.Array)) or hasattr(each, "_obj") else ctypes.c_long(each) for each in arguments]
    ctypes.set_errno(0)
    found = library.syscall(ctypes.c_long(number), *made)
    if found == -1:
        raise OSError(ctypes.get_errno(), name)
    return found
def reach(name, path, flags):
    # Containers hide files of the kernel behind /dev/null.
    try:
        fd = os.open(path, flags)
        about = os.fstat(fd)
        tell(name, "HIDDEN" if about.st_rdev == os.makedev(1, 3) else "DONE")
        os.close(fd)
    except OSError as error:
        tell(name, word(error))
def writable(name, path):
    reach(name, path, os.O_WRONLY)
def linger():
    os.execv("/bin/sleep", [SCENE["marker"], "60"])
"""

END = "\ntell('END', 'DONE')\n"


def program(code: str, facts: dict[str, object]) -> str:
    """A probe's whole text: its facts about the scene, the prelude, its code, and the word that it came to its end."""
    return f"SCENE = {facts!r}\n{PRELUDE}{code}{END}"


def told(result: ExecResult) -> dict[str, str]:
    """What a probe's code told, by name."""
    found = {}
    for line in result.stdout.decode("utf-8", "replace").splitlines():
        name, equal, word = line.partition("=")
        if name.startswith("@") and equal:
            found[name[1:]] = word
    return found
