"""The command line and its commands.

In: the arguments of `fppo`. Out: an exit status, lines on the console, and the files of runs. Help and checks of
settings answer before torch is loaded. Begin with `cli.main`; `actions` has the commands that need torch, `ends` the
messages and exit statuses of errors.
"""
