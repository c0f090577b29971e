"""Escape probes: code that tries to get out of a box, and judges of whether it did. Used by the tests and by `palestra doctor sandbox`."""
