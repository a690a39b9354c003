"""Rotary positions: heads of queries and keys turned by the angles of their tokens."""
