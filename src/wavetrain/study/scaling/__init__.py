"""Scaling studies: a file of what to sweep, a record per point, and what follows from the records."""
