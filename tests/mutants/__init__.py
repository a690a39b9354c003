"""One-line mistakes that the tests must catch, by room, and the program that plants them: `python -m tests.mutants`."""
