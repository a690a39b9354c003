"""Responses of several turns: tools that answer, and the encoding of their messages."""
