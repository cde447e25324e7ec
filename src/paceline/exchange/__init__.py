"""Stores of other tools, taken in and given out: `import-store` and `export-store`."""
