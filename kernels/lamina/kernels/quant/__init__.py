"""Quantised formats as seen by the backends."""
