"""What `palestra status` says of a service's engines."""

from __future__ import annotations

from palestra.cli.status import lost_engines

FINE = {"url": "http://a", "state": "serving", "why": ""}
LOST = {"url": "http://b", "state": "quarantined", "why": "does not answer (5 s)"}


def test_engines_without_requests_are_named_with_the_reason() -> None:
    assert lost_engines([FINE, FINE]) == []
    assert lost_engines([]) == []
    assert lost_engines([FINE, LOST]) == ["1 of 2 engines serve", "http://b does not: does not answer (5 s)"]
