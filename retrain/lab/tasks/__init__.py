"""Tasks of the testbed; each has one premise.

A task's docstring begins with a clause that states the premise and ends at a colon or full stop. Report cards quote it
as "on TASK, where CLAUSE".
"""
