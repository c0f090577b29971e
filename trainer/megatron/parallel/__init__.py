"""Megatron-core over several processes: tensor, pipeline, context, expert and data parallel training of the models that `trainer/megatron`
trains in one process.

`backend.ParallelBackend` is the door. Every process of a run calls the same methods with the same arguments (SPMD) and gets the same
answers; files and exported weights are rank 0's. No run starts such processes by itself: `[train]` refuses layouts of more than one
process, and who wants one calls `process.join`, `process.arrange` and `ParallelBackend.from_folder` in each of them.

Shared beginnings are computed once under every layout, as in one process: attention sees all nodes of a token tree, whichever way they are
spread. Verified on CPUs with gloo (tests/test_parallel_layouts.py); nothing here was run on a GPU.
"""
