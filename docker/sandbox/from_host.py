"""The sandbox's image made from this host's own files: its python3, bash, the usual small programs, and the libraries they need.

In: this host (Linux, with /usr/bin/python3 3.9 or newer and ldd). Out: a tar archive of a root file system of about 80 MB, written to a
file or handed to a container engine as `palestra-sandbox:1`. No registry is asked. Waits for ldd, and for the engine.

    python docker/sandbox/from_host.py --tag palestra-sandbox:1 [--host unix:///var/run/docker.sock]
    python docker/sandbox/from_host.py --output root.tar
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

PROGRAMS = (
    "python3 sh bash awk basename cat chmod cmp comm cp cut date dd df diff dirname du echo env expr false find grep gzip head "
    "hostname id install kill ln ls md5sum mkdir mkfifo mktemp mv nice nohup nproc od paste pidof printenv printf ps pwd readlink "
    "realpath rev rm rmdir sed seq setsid sha256sum shuf sleep sort split stat stty sync tac tail tar tee test timeout touch tr "
    "true truncate tty uname uniq unlink wc which whoami xargs yes"
)
"""What scripts of models use most, separated by spaces. A program that this host lacks is left out; python3, sh and bash must be there."""
EXTRA_LIBRARIES = ("libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1")
"""What compiled packages such as numpy link to, beside what python does."""
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "dist-packages",
    "site-packages",
}
"""Folders of the standard library that no box needs."""
FILES = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nbox:x:1000:1000:box:/workspace:/bin/bash\n",
    "etc/group": "root:x:0:\nbox:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
FOLDERS = {
    "tmp": 0o1777,
    "workspace": 0o755,
    "proc": 0o755,
    "sys": 0o755,
    "dev": 0o755,
    "opt/packages": 0o755,
    "run": 0o755,
}
CHANGES = ["USER 1000:1000", "WORKDIR /workspace", "ENV PATH=/usr/local/bin:/usr/bin:/bin", 'CMD ["python3"]']


def canonical(path: str) -> str:
    """The path with links in its folders resolved, but not the last step: a link stays a link."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def libraries(files: Iterable[str]) -> set[str]:
    """Shared libraries that these programs and libraries need, by absolute path."""
    found: set[str] = set()
    for path in files:
        done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # a script, or a static program, has none
            found.update(word for line in done.stdout.splitlines() for word in line.split() if word.startswith("/"))
    return found


def programs() -> list[str]:
    """Absolute paths of the programs that this host has.

    Raises:
        SystemExit: python3, sh or bash is missing.
    """
    found = {name: shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in PROGRAMS.split()}
    if missing := [name for name in ("python3", "sh", "bash") if not found[name]]:
        raise SystemExit(
            f"this host has no {', '.join(missing)} in /usr/bin; install them, or use docker/sandbox/Dockerfile"
        )
    return [path for path in found.values() if path]


def library_folder() -> Path:
    """The standard library of the host's python3 (its own one, never that of a virtual environment)."""
    ask = [programs()[0], "-I", "-S", "-c", "import os; print(os.path.dirname(os.__file__))"]
    return Path(subprocess.run(ask, capture_output=True, text=True, check=True, cwd="/").stdout.strip())


def standard_library() -> Iterator[str]:
    """Files of the standard library."""
    for folder, folders, files in os.walk(library_folder()):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("config-"))
        yield from (os.path.join(folder, name) for name in sorted(files))


def extra_libraries(needed: Iterable[str]) -> list[str]:
    """Paths of `EXTRA_LIBRARIES` that lie beside the libraries that are needed anyway."""
    folders = dict.fromkeys(os.path.dirname(path) for path in needed)
    found = ((os.path.join(folder, name) for folder in folders) for name in EXTRA_LIBRARIES)
    return [path for paths in found if (path := next(filter(os.path.exists, paths), None))]


def locale() -> list[str]:
    """Files of C.UTF-8: without them bash counts bytes for characters."""
    return [str(path) for path in sorted(Path("/usr/lib/locale/C.utf8").rglob("*")) if path.is_file()]


class Root:
    """The archive as it grows. Each path is written once, links with what they point to, all owned by root."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.archive = archive
        self.done: set[str] = set()

    def add(self, path: str) -> None:
        """A file of the host at its own place; of a link, also what it points to. A link to nothing stays behind."""
        path = canonical(path)
        if path in self.done or not os.path.exists(path):
            return
        self.done.add(path)
        info = self.archive.gettarinfo(path, arcname=path.lstrip("/"))
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode &= 0o755  # no setuid program goes in
        if info.issym():
            self.archive.addfile(info)
            self.add(os.path.join(os.path.dirname(path), os.readlink(path)))
        else:
            with open(path, "rb") as file:
                self.archive.addfile(info, file)

    def write(self, name: str, text: str) -> None:
        """A file with this text."""
        info = tarfile.TarInfo(name)
        info.size = len(text)
        self.archive.addfile(info, io.BytesIO(text.encode()))

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self.archive.addfile(info)

    def folder(self, name: str, mode: int) -> None:
        """An empty folder."""
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self.archive.addfile(info)


def write_root(out: IO[bytes]) -> None:
    """Writes the whole root file system as a tar archive."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        root = Root(archive)
        for name, mode in FOLDERS.items():
            root.folder(name, mode)
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if os.path.islink(f"/{name}"):
                root.link(name, os.readlink(f"/{name}"))
        found, library = programs(), list(standard_library())
        compiled = [path for path in library if path.endswith(".so")]
        extra = extra_libraries(sorted(libraries(found)))
        for path in [*found, *library, *extra, *locale(), *sorted(libraries([*found, *compiled, *extra]))]:
            root.add(path)
        if os.path.exists("/etc/ld.so.cache"):
            root.add("/etc/ld.so.cache")
        for name, text in FILES.items():
            root.write(name, text)


def import_root(root: IO[bytes], tag: str, host: str | None) -> str:
    """Hands the archive to the engine; its image's id."""
    import docker

    client = docker.APIClient(base_url=host or os.environ.get("DOCKER_HOST"), version="auto", timeout=300)
    try:
        repository, _, version = tag.partition(":")
        client.import_image_from_data(root, repository=repository, tag=version or "latest", changes=CHANGES)
        return str(client.inspect_image(tag)["Id"])
    finally:
        client.close()


def main() -> int:
    """Makes the image; what it printed is its id or the file."""
    parser = argparse.ArgumentParser(description="The sandbox's image from this host's own files.")
    parser.add_argument("--tag", default="palestra-sandbox:1", help="name of the image")
    parser.add_argument("--host", help="the engine's address (default: DOCKER_HOST, or the local socket)")
    parser.add_argument("--output", help="write the archive here and ask no engine")
    given = parser.parse_args()
    if given.output:
        with open(given.output, "wb") as out:
            write_root(out)
        print(given.output)
        return 0
    with tempfile.TemporaryFile() as root:
        write_root(root)
        root.seek(0)
        print(import_root(root, given.tag, given.host))
    return 0


if __name__ == "__main__":
    sys.exit(main())
