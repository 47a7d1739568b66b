"""Files that a job reads and a run writes."""
