"""16-bit training; the engine scales the loss itself."""
