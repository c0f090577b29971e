"""The APIs that callers speak, on the wire: OpenAI's chat completions, completions and responses, and Anthropic's messages.

In: a request's body, bytes. Out: a checked `ModelCall`; and of a `ModelReply` the API's own JSON object or its server-sent events. All is
pure and without state, and nothing waits. What a body says wrong is a SessionError 400 that names the place, whatever the bytes.
"""
