"""What steps optimise, measured exactly: the bias and noise of the gradients of estimators, losses and KL kinds.

In: functions by name, of the library's or one's own, and the sizes of small worlds. Out: tables of numbers, as text,
JSON, Markdown and a picture.
Begin with `study.study`; `text` writes its tables, `chart` draws them.
"""
