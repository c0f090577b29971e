"""Who may use a host. In: the headers of a request. Out: nothing, or a refusal. Waits for nothing."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from palestra.server.env_host.types import SESSION_ERROR, EnvRefusal


class Guard:
    """Holds the token that clients must bear; None: anybody who reaches the host may use it."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else f"Bearer {token}".encode()

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Looks at a request's headers, whose names are in small letters.

        Raises:
            EnvRefusal: it has not the token, or a page of another site sent it from a browser of this machine.
        """
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != headers.get(b"host", b""):
            raise EnvRefusal("requests of other sites' pages are not served", 403, SESSION_ERROR)
        if self._token is not None and not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
            raise EnvRefusal("a token is needed: Authorization: Bearer TOKEN", 401, SESSION_ERROR)
