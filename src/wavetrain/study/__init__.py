"""Studies: predictions against published measurements, sweeps, reports."""
