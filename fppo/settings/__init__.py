"""Settings: frozen classes that check themselves, read from files and the command line. Nothing here imports torch."""
