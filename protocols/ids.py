"""Names of the things that are counted, so that one count is not passed for another."""

from typing import NewType

Ordinal = NewType("Ordinal", int)
"""Place of a trajectory in the order of drawing, from 0, over all epochs: its ledger entry."""

PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps behind a set of student weights."""

ReplicaId = NewType("ReplicaId", str)
"""One running student engine; a replacement has another id."""
