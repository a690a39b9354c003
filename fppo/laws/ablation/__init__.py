"""Every implementation of an operation side by side: errors, time, memory, and whether it keeps its laws."""
