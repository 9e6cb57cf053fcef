"""``hotloop doctor``: finds what is wrong with a machine or a program, what it costs, and what to change.

Judging is separate from gathering: plain facts go in, findings come out, so tests judge the facts of other machines.
The half that judges machines never imports torch in this process, since a torch that crashes is one of its findings.
"""
