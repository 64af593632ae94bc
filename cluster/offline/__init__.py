"""Files of requests answered without a server. Knows OpenAI's batch format and our HTTP API as a function."""
