"""What all layers use: sync and async variants, locks, arguments, units."""
