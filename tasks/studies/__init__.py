"""Studies: many runs of one task, described in a sweep file, launched, and summarized in tables and figures.

The modules import each other in one direction: columns, published, config, smoke, plan, state, then table, choice,
curves, figures and report, and beside them preflight, the runner and slurm. A study knows a task by its command line
and by the files that a run leaves.
"""
