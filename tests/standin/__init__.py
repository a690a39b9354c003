"""A stand-in for an accelerator: torch's PrivateUse1 on this machine's CPU, in a process of its own."""
