"""Probes of the kernel: privileges, namespaces, mounts, its settings, its devices, and calls that widen what can be attacked."""

from __future__ import annotations

from palestra.sandbox.attacks.judges import fails, finished, refused, untried
from palestra.sandbox.attacks.types import Attack, Judged, Seen

_CAPABILITIES = """
import ctypes
library = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
call("capget", header, data)
held = [data[0] | data[3], data[1] | data[4], data[2] | data[5]]
tell("capabilities", "DONE" if any(held) else "EPERM")
tell("bounding", "DONE" if any(library.prctl(23, number, 0, 0, 0) == 1 for number in range(41)) and held[1] else "EPERM")
tell("new privileges", "EPERM" if library.prctl(39, 0, 0, 0, 0) == 1 else "DONE")
tell("root", "DONE" if 0 in os.getresuid() else "EPERM")
attempt("setuid", lambda: os.setuid(0))
attempt("setgroups", lambda: os.setgroups([0]))
"""

_SETUID = """
import stat
marked = []
for folder in ("/usr/bin", "/usr/sbin", "/bin", "/usr/lib/openssh", "/usr/lib/dbus-1.0"):
    if os.path.isdir(folder):
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mode & stat.S_ISUID:
                marked.append(entry.path)
for path in sorted(marked)[:6]:
    ins, _ = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(ins, 0)
        null = os.open("/dev/null", os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.execv(path, [path])
    time.sleep(0.05)
    try:
        with open("/proc/%d/status" % pid) as file:
            real, effective = next(line for line in file if line.startswith("Uid:")).split()[1:3]
        tell(path, "EPERM" if real == effective else "DONE")
    except OSError as error:
        tell(path, word(error))
tell("looked", "EPERM")
"""

_NAMESPACES = """
flags = {"user": 1 << 28, "pid": 1 << 29, "net": 1 << 30, "mount": 1 << 17, "ipc": 1 << 27, "uts": 1 << 26, "cgroup": 1 << 25}
for name, flag in flags.items():
    attempt("unshare " + name, lambda: call("unshare", flag))
def clone(flag):
    if call("clone", flag | 17, 0, 0, 0, 0) == 0:
        os._exit(0)
attempt("clone user", lambda: clone(0x10000000))
attempt("clone3", lambda: call("clone3", b"\\0" * 88, 88))
def enter():
    fd = os.open("/proc/self/ns/user", os.O_RDONLY)
    try:
        call("setns", fd, 0)
    finally:
        os.close(fd)
attempt("setns", enter)
"""

_MOUNTS = """
attempt("tmpfs", lambda: call("mount", b"none\\0", b"/tmp\\0", b"tmpfs\\0", 0, 0))
attempt("remount", lambda: call("mount", b"none\\0", b"/\\0", b"\\0", 0x1020, 0))
attempt("proc", lambda: call("mount", b"proc\\0", b"/tmp\\0", b"proc\\0", 0, 0))
attempt("umount", lambda: call("umount2", b"/tmp\\0", 4))
attempt("pivot", lambda: call("pivot_root", b"/tmp\\0", b"/tmp\\0"))
attempt("chroot", lambda: call("chroot", b"/tmp\\0"))
attempt("fsopen", lambda: call("fsopen", b"tmpfs\\0", 0))
attempt("open_tree", lambda: call("open_tree", -100, b"/\\0", 1))
attempt("move_mount", lambda: call("move_mount", -100, b"/tmp\\0", -100, b"/tmp\\0", 0))
attempt("fspick", lambda: call("fspick", -100, b"/\\0", 0))
attempt("mount_setattr", lambda: call("mount_setattr", -100, b"/\\0", 0, b"\\0" * 32, 32))
"""

_SURFACE = """
attempt("bpf", lambda: call("bpf", 0, b"\\0" * 72, 72))
attempt("perf", lambda: call("perf_event_open", b"\\0" * 112, 0, -1, -1, 0))
attempt("io_uring", lambda: call("io_uring_setup", 1, b"\\0" * 120))
attempt("userfaultfd", lambda: call("userfaultfd", 0))
attempt("handle", lambda: call("open_by_handle_at", -100, b"\\0" * 16, 0))
attempt("kcmp", lambda: call("kcmp", os.getpid(), os.getpid(), 0, 0, 0))
attempt("ptrace", lambda: call("ptrace", 0x4206, os.getppid(), 0, 0))
"""

_KEYRING = """
made = 0
try:
    for made in range(500):
        call("add_key", b"user\\0", ("palestra-%d" % made).encode() + b"\\0", b"x" * 4096, 4096, -3)
    tell("fill", "DONE")
except OSError as error:
    tell("fill", word(error) if made == 0 else "DONE")
attempt("session", lambda: call("keyctl", 0, -3, 1))
attempt("request", lambda: call("request_key", b"user\\0", b"palestra\\0", 0, -3))
"""

# Each with arguments that do nothing where the call is granted.
_ADMINISTRATION = """
attempt("reboot", lambda: call("reboot", 0, 0, 0, 0))
attempt("kexec", lambda: call("kexec_load", 0, 1 << 20, 0, -1))
attempt("module", lambda: call("init_module", 0, 0, 0))
attempt("module file", lambda: call("finit_module", -1, 0, 0))
attempt("unload", lambda: call("delete_module", b"palestra_none\\0", 0x800))
attempt("swap", lambda: call("swapon", b"/nowhere\\0", 0))
attempt("accounting", lambda: call("acct", b"/nowhere\\0"))
attempt("kernel log", lambda: call("syslog", 3, b"\\0" * 64, 64))
attempt("fanotify", lambda: call("fanotify_init", 0, 0))
name = os.uname().nodename.encode()
attempt("host name", lambda: call("sethostname", name + b"\\0", len(name)))
"""

_CLOCK = """
attempt("realtime", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
attempt("adjtimex", lambda: call("adjtimex", (0x1).to_bytes(4, "little") + b"\\0" * 252))
"""

_SETTINGS = """
names = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
    "/proc/sys/kernel/randomize_va_space", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/net/ipv4/ip_forward", "/proc/timer_list",
    "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/module/kernel/parameters/panic",
    "/proc/irq/default_smp_affinity", "/proc/mtrr", "/proc/acpi/wakeup"]
for path in names:
    writable(path, path)
def lower():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
attempt("oom_score_adj", lower)
"""

_CGROUPS = """
tried = 0
for top, folders, files in os.walk("/sys/fs/cgroup"):
    del folders[40:]
    for name in files:
        if name in ("cgroup.procs", "tasks", "release_agent", "notify_on_release", "memory.max", "memory.limit_in_bytes", "pids.max",
                    "devices.allow", "cgroup.subtree_control"):
            tried += 1
            try:
                os.close(os.open(os.path.join(top, name), os.O_WRONLY))
            except OSError:
                continue
            tell(os.path.join(top, name), "DONE")
    if tried > 2000:
        break
attempt("folder", lambda: os.mkdir("/sys/fs/cgroup/planted"))
attempt("mount", lambda: call("mount", b"none\\0", b"/tmp\\0", b"cgroup2\\0", 0, 0))
"""

_DEVICES = """
for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/sda", "/dev/vda",
             "/dev/loop0", "/dev/loop-control", "/dev/mapper/control", "/dev/uinput", "/dev/hpet", "/dev/vhost-net", "/dev/nvme0n1",
             "/proc/kcore"):
    reach(path, path, os.O_RDONLY)
import stat
def node(kind, major, minor):
    os.mknod("node", kind | 0o666, os.makedev(major, minor))
    os.close(os.open("node", os.O_RDONLY))
attempt("character", lambda: node(stat.S_IFCHR, 1, 1))
attempt("block", lambda: node(stat.S_IFBLK, 8, 0))
"""

_TERMINAL = """
import fcntl
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
attempt("terminal", lambda: os.close(os.open("/dev/tty", os.O_RDWR)))
for number in (0, 1, 2):
    attempt("push %d" % number, lambda: fcntl.ioctl(number, TIOCSTI, b"x"))
attempt("paste", lambda: fcntl.ioctl(0, TIOCLINUX, b"\\3"))
for path in ("/dev/console", "/dev/tty0", "/dev/tty1", "/dev/pts/0", "/dev/vcs"):
    attempt(path, lambda: os.close(os.open(path, os.O_RDWR | os.O_NOCTTY)))
"""

_SYSV = """
for name, make in {
    "shm": lambda: call("shmget", SCENE["key"], 1 << 20, 0o1666),
    "sem": lambda: call("semget", SCENE["key"], 1, 0o1666),
    "msg": lambda: call("msgget", SCENE["key"], 0o1666),
}.items():
    attempt(name, make)
"""


def _left_in_the_box(seen: Seen) -> Judged:
    detail = " ".join(f"{name}={word}" for name, word in seen.said.items())
    if left := seen.scene.ipc_left():
        return Judged("ESCAPED", f"left out here: {', '.join(left)}", detail)
    return Judged("contained", "none left", detail) if finished(seen) else untried(seen)


ATTACKS = (
    Attack("capabilities", "has, gains or keeps privileges", "processes", _CAPABILITIES, fails),
    Attack("setuid programs", "runs programs that change their user", "processes", _SETUID, fails),
    Attack("namespaces", "makes or enters namespaces, a user's above all", "syscalls", _NAMESPACES, fails),
    Attack("mounts", "mounts, unmounts, changes the root", "syscalls", _MOUNTS, fails),
    Attack("kernel surface", "bpf, perf, io_uring, userfaultfd, file handles, ptrace", "syscalls", _SURFACE, refused),
    Attack("keyrings", "fills the kernel's keyring", "syscalls", _KEYRING, refused),
    Attack(
        "administration", "reboot, kexec, modules, swap, accounting, kernel log", "processes", _ADMINISTRATION, refused
    ),
    Attack("clock", "sets the clock", "processes", _CLOCK, refused),
    Attack("kernel settings", "opens /proc/sys, sysrq, core_pattern, /sys for writing", "files", _SETTINGS, fails),
    Attack("cgroups", "opens its own and other cgroups for writing", "processes", _CGROUPS, fails),
    Attack("devices", "opens memory and disks, makes device nodes", "files", _DEVICES, fails),
    Attack("terminal", "types into a terminal (TIOCSTI, TIOCLINUX)", "processes", _TERMINAL, fails),
    Attack("System V objects", "leaves shared memory, semaphores, queues", "processes", _SYSV, _left_in_the_box),
)
