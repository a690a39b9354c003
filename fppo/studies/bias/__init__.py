"""Bias and noise of what steps optimise, measured exactly, for estimators, losses, weight modes and KL kinds.

In: functions by name, of the library's or one's own, and the sizes of small worlds. Out: tables of numbers, as text,
JSON, Markdown and a picture.
Begin with `study.study`; `text` writes its tables, `chart` draws them.
"""
