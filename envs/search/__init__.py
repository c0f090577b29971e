"""Searching: corpora, retrievers of several kinds over them, generated questions, and the environment that asks them.

Nothing is loaded before it is asked for: the packages behind a corpus or a retriever are extras.
"""
