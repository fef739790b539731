"""Random programs as source text: written, run against the definition, and shrunk to a few lines that can be pasted."""
