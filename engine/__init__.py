"""What is decided: asyncio and arithmetic, no cluster."""
