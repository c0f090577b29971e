"""Calls of a container engine through the docker SDK, which blocks: everything here is called in threads.

In: an address, and bodies of calls. Out: ids, descriptions; errors are converted here. The SDK is loaded by `Engine.connect`. Waits for the
engine, at most `timeout_s` for each answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from palestra.sandbox.container_attach import Endpoint
from palestra.sandbox.container_labels import EXPIRES, OWNER, left_behind
from palestra.sandbox.types import SandboxError, SandboxUnavailableError

OLDEST = "1.41"
"""Version of the Engine API from which a cgroup namespace can be asked for: Docker 20.10."""
DEFAULT_SOCKET = "unix:///var/run/docker.sock"


class Engine:
    """One engine's calls."""

    def __init__(self, api: Any, url: str, endpoint: Endpoint) -> None:
        """Use `connect`."""
        self._api, self.url, self.endpoint = api, url, endpoint
        self.version = str(api.api_version)
        self.info: dict[str, Any] = {}

    @classmethod
    def connect(cls, base_url: str | None, *, connections: int, timeout_s: float) -> Engine:
        """Reaches the engine and asks what it is. `base_url` None: DOCKER_HOST with its TLS variables, else the local socket.

        Raises:
            SandboxUnavailableError: no SDK, no engine, or one that is too old.
        """
        try:
            import docker
        except ImportError as error:
            raise SandboxUnavailableError(
                f"the docker backend needs the docker SDK ({error}): pip install 'palestra[sandbox]'"
            ) from error
        with told("reaching it"):
            given = docker.utils.kwargs_from_env()
            url = base_url or given.get("base_url") or DEFAULT_SOCKET
            tls = given.get("tls") if url.startswith(("tcp:", "https:")) else None
            endpoint = Endpoint.of(url, tls)

            def client(version: str) -> Any:
                made = docker.APIClient(url, version, timeout_s, tls or False, max_pool_size=connections)
                # Proxies and certificates of the surroundings are for the web; attaching goes straight, too.
                made.trust_env = False
                return made

            version = _version(client(OLDEST), url)
            engine = cls(client(version), url, endpoint)
            engine.info = engine._api.info()
        return engine

    @property
    def filters(self) -> bool:
        """Whether it can put a system call filter on a container."""
        return any(option.startswith("name=seccomp") for option in self.info.get("SecurityOptions") or ())

    def check_image(self, image: str, *, pull: bool) -> None:
        """Makes sure that boxes can be made from this image.

        Raises:
            SandboxUnavailableError: it is not there, or would let code write to the host's disk.
        """
        from docker.errors import ImageNotFound

        with told(f"looking for image {image}"):
            try:
                found = self._api.inspect_image(image)
            except ImageNotFound:
                if not pull:
                    raise SandboxUnavailableError(
                        f"the container engine at {self.url} has no image {image}: make it (python docker/sandbox/from_host.py --tag "
                        f"{image}, or docker build -t {image} docker/sandbox), docker pull it, or let the backend do so (pull=True)"
                    ) from None
                repository, _, tag = image.partition("@") if "@" in image else image.rpartition(":")
                self._api.pull(
                    image if "@" in image or not repository else repository, tag=None if "@" in image else tag
                )
                found = self._api.inspect_image(image)
        if volumes := (found.get("Config") or {}).get("Volumes"):
            raise SandboxUnavailableError(
                f"image {image} declares volumes ({', '.join(volumes)}): code could fill the host's disk; build it without VOLUME"
            )

    def create(self, name: str, body: Mapping[str, Any]) -> str:
        """A container that does not run yet; its id.

        Raises:
            SandboxUnavailableError: the engine cannot make one like this.
        """
        with told("making a box"):
            return str(self._api.create_container_from_config(dict(body), name)["Id"])

    def start(self, container: str) -> int:
        """Starts it; its first process's id where the engine is.

        Raises:
            SandboxUnavailableError: the image has no such program, or the engine cannot confine it.
        """
        with told("starting a box"):
            self._api.start(container)
            return int(self._api.inspect_container(container)["State"]["Pid"])

    def remove(self, container: str) -> None:
        """Kills and removes it, with what volumes it may have; returns when it is gone. One that is going by itself is waited for.

        Raises:
            SandboxError: the engine cannot.
        """
        from docker.errors import APIError, NotFound

        with told("removing a box"):
            try:
                self._api.remove_container(container, v=True, force=True)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:  # its removal is under way
                    raise
            with contextlib.suppress(NotFound):
                self._api.wait(container, condition="removed")

    def reap(self) -> int:
        """Removes containers whose owners will not come back; how many."""
        done = 0
        with told("looking for boxes"):
            found = self._api.containers(all=True, filters={"label": [OWNER, EXPIRES]})
        for container in found:
            if left_behind(container["Labels"], time.time()):
                self.remove(container["Id"])
                done += 1
        return done

    def close(self) -> None:
        """Gives its connections up."""
        self._api.close()


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turns errors of the SDK, and of the HTTP client under it, into ours.

    Raises:
        SandboxUnavailableError: it is the request that cannot be fulfilled.
        SandboxError: the engine failed, or did not answer.
    """
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        text = str(error.explanation or error)
        if "executable file not found" in text or "no such file or directory: unknown" in text:
            text += "; the image needs Python 3.9 or newer, and its name in `python`"
        kind = SandboxUnavailableError if error.status_code in (400, 404) else SandboxError
        raise kind(f"the container engine failed at {what}: {text[:1000]}") from error
    except (DockerException, RequestException, OSError) as error:
        raise SandboxError(
            f"the container engine failed at {what}: {str(error)[:1000] or type(error).__name__}"
        ) from error


def _version(api: Any, url: str) -> str:
    """The newest version of the API that the engine speaks."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        with contextlib.closing(api):
            found = str(api.version(api_version=False)["ApiVersion"])
    except (DockerException, RequestException, OSError) as error:
        raise SandboxUnavailableError(
            f"no container engine at {url} ({error}): start one (systemctl start docker), or name yours in DOCKER_HOST; where permission "
            "is denied, this user needs to be in the socket's group (docker)"
        ) from error
    if numbers(found) < numbers(OLDEST):
        raise SandboxUnavailableError(f"the container engine at {url} is older than Docker 20.10; install a newer one")
    return found


def numbers(version: str) -> tuple[int, ...]:
    """A version as something that can be compared."""
    return tuple(int(part) for part in version.split("."))
