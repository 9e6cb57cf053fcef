"""``hotloop doctor``: what is wrong with a machine or with a program, what it costs, what to change.

Judging is apart from gathering: plain facts go in, findings come out, so that it is tested from the facts of other
machines. The part that judges machines never imports torch itself, since a torch that crashes is one of its findings.
"""
