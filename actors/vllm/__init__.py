"""Student and teacher engines: Ray Serve replicas over vLLM's asynchronous engine."""
