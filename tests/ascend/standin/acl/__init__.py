"""The name of CANN's Python package, for modules that only import it."""
