"""The command line: parses, calls the function of the verb, prints. Nothing imports it."""
