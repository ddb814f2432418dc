"""What every other package stands on: units, errors, documents with line numbers, lossless JSON."""
