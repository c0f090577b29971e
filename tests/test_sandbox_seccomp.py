"""The filter refuses what its table says, to real processes, and lets ordinary programs run."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.sandbox import seccomp

CLONE_NEWUSER = 0x10000000


def _confined(probe: Callable[[ctypes.CDLL], int], *, inet: bool = True) -> int:
    """What `probe` returns in a forked child that has the filter; negative: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            seccomp.install(inet=inet)
            code = probe(ctypes.CDLL(None, use_errno=True))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _call(number: int, *arguments: int) -> Callable[[ctypes.CDLL], int]:
    """A probe: a system call by its number; 0 if it works, else its error."""

    def probe(libc: ctypes.CDLL) -> int:
        return 0 if libc.syscall(number, *(ctypes.c_long(each) for each in arguments)) >= 0 else ctypes.get_errno()

    return probe


HERE = os.uname().machine
COLUMN = seccomp.MACHINES.index(HERE) if HERE in seccomp.MACHINES else -1
pytestmark = pytest.mark.skipif(COLUMN < 0, reason="no table for this machine")


def test_every_call_of_the_table_is_refused() -> None:
    numbers = {name: pair[COLUMN] for name, pair in seccomp.DENIED.items()}
    known = {name: number for name, number in numbers.items() if number is not None}
    read, write = os.pipe()

    def probe(libc: ctypes.CDLL) -> int:
        for name, number in known.items():
            if _call(number, -1, -1, -1, -1, -1)(libc) != errno.EPERM:
                os.write(write, f"{name} ".encode())
        return 0

    assert _confined(probe) == 0
    os.close(write)
    with open(read) as allowed:
        assert allowed.read() == ""
    assert len(known) > 60


def test_arguments_decide_about_clone_sockets_and_terminals() -> None:
    assert _confined(_call(seccomp.CLONE3, 0, 0)) == errno.ENOSYS
    assert _confined(_call(seccomp.CLONE[HERE], CLONE_NEWUSER | 17, 0, 0, 0, 0)) == errno.EPERM
    sockets, pairs = seccomp.SOCKETS[HERE]
    for family in (1, 2, 10):
        assert _confined(_call(sockets, family, 1, 0)) == 0
    for family in (0, 3, 16, 17, 31, 38, 40):
        assert _confined(_call(sockets, family, 3, 0)) == errno.EAFNOSUPPORT
        assert _confined(_call(pairs, family, 3, 0)) == errno.EAFNOSUPPORT
    for request in seccomp.TERMINAL:
        assert _confined(_call(seccomp.IOCTL[HERE], 0, request, 0)) == errno.EPERM
        # The kernel looks at the lower half alone.
        assert _confined(_call(seccomp.IOCTL[HERE], 0, request | 1 << 32, 0)) == errno.EPERM
    assert _confined(_call(sockets, 2, 1, 0), inet=False) == errno.EAFNOSUPPORT
    assert _confined(_call(sockets, 1, 1, 0), inet=False) == 0


@pytest.mark.skipif(HERE != "x86_64", reason="only x86_64 has a second numbering")
def test_another_numbering_ends_the_process() -> None:
    assert _confined(_call(seccomp.X32 | 39)) == -31  # getpid of x32: SIGSYS


def test_ordinary_programs_run() -> None:
    script = (
        "import threading, subprocess, socket, os, tempfile; t = threading.Thread(target=print); t.start(); t.join();"
        "subprocess.run(['/bin/true'], check=True); socket.socketpair(); os.fork() or os._exit(0); os.wait(); tempfile.TemporaryFile()"
    )

    def probe(libc: ctypes.CDLL) -> int:
        return subprocess.run([sys.executable, "-S", "-c", script], stdout=subprocess.DEVNULL, check=False).returncode

    assert _confined(probe) == 0


def test_jumps_stay_inside_and_the_last_word_is_allow() -> None:
    for machine in seccomp.MACHINES:
        for inet in (True, False):
            code = seccomp.program(machine, inet=inet)
            steps = list(struct.iter_unpack("HBBI", code))
            assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)
            for place, (_, true, false, _) in enumerate(steps):
                assert place + 1 + max(true, false) < len(steps) or steps[place][0] in (0x06, 0x20)
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program("riscv64")


@pytest.mark.ci
def test_numbers_are_the_kernels() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.fail("no kernel headers: apt-get install linux-libc-dev")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    for name, (number, _) in seccomp.DENIED.items():
        assert known.get(name, number) == number, name


def test_docker_gets_the_same_table() -> None:
    profile = seccomp.docker_profile()
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert profile["syscalls"][0]["names"] == list(seccomp.DENIED)
    assert {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []} in profile["archMap"]
    refused = {
        rule["args"][0]["value"]
        for rule in profile["syscalls"]
        if "socket" in rule["names"] and rule["args"][0]["op"] == "SCMP_CMP_EQ"
    }
    assert refused == set(range(10)) - set(seccomp.FAMILIES)
