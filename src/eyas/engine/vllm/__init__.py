"""vLLM: a connector inside the server that stages hidden states, and the client that captures from it."""
