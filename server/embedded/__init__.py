"""The embedded engine: a small HTTP process over transformers' models, with SGLang's native surface."""
