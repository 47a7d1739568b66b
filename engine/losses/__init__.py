"""Divergences between teacher and student, vocabulary-parallel, with exact gradients."""
