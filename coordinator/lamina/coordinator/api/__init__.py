"""The HTTP API: one internal vocabulary of generation, and the OpenAI adapter that converts to and from it."""
