"""One script a question: what it measured, against which limit, and whether a bound holds."""
