"""What touches the world: Ray, Serve, vLLM, Megatron, files, the command line."""
