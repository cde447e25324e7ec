"""The EAGLE-3 draft as a library: its shape, its weights, its unrolled steps and its losses."""
