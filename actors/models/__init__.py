"""Model folders in Hugging Face format: made from GGUF, pruned, or drawn at random for tests."""
