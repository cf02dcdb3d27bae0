"""Reports from stored results: one self-contained HTML page, and the same as Markdown with its pictures beside it."""
