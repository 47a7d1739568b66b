"""The checks before a run: what a person is told that starts nothing."""
