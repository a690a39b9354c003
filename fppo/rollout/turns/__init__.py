"""Responses of several turns: tools that answer, and how their words become tokens."""
