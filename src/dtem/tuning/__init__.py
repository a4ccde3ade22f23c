"""`tune`: the plan, one r per block, that reaches a time on this machine with the least divergence.

tune.py      dtem.tune: measure, search, time, report
probes.py    costs of a model on this machine
search.py    divergence of plans, and the search for the best one
"""
