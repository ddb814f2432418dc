"""What things cost: one small function per law, its source beside it."""
