"""What runs inside a box: the agent. Standard library only, Python 3.9 or newer; see `agent`.

These modules are sent into the box (`sandbox.bundle`) and are imported there as `palestra_box.NAME`; the supervisor itself imports `frames`
alone.
"""
