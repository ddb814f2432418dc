"""Which plan is best: the exact choice of how every operator is kept, and the proof that none is better."""
