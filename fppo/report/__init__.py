"""Pictures and pages of a run.

In: a run's directory, as `runs` writes it. Out: report.html, curves, the viewer's page and server, comparisons of
several runs, and the first difference of two runs. Nothing is read back. Begin with `write.write_report`; `compare` has
means over seeds, `diff` the first difference, `view_page` and `view_server` the viewer.
"""
