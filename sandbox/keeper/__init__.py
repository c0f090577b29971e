"""The keeper: a small process of ours that starts the boxes of this machine, watches them, and ends them when the service is gone.

It is one thread that lives as long as its boxes, so the kernel's parent-death signals mean what they say; it forks cheaply however large
the service is; and it outlives a service that is killed just long enough to clear up. `client` is the service's side of it, the other
modules run in it. They load little: neither asyncio nor typing.
"""
