"""Commands that need a file of their own, and what all commands share: reading options, printing, writing files."""
