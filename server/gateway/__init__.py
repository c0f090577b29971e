"""The front of the service: sessions, the OpenAI dialect, and one turn from messages to a durable record."""
