"""Which device gets which layers, in bytes; refuses with numbers."""
