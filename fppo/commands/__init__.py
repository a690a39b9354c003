"""The command line, and what its commands do.

In: the words behind `fppo`. Out: an exit status, lines on the console, and what runs write to their directories. Help
and checks of settings answer before torch is loaded.
Begin with `cli.main`; `actions` has what needs torch, `ends` what becomes of errors.
"""
