"""Damaged files and odd command lines by the thousand: each must end in the right result or in one sentence.

python -m tests.fuzz --minutes 10

mutate.py makes damage, kinds.py says for each kind of input what is right, with judge.py as a second reader of
checkpoints, and runner.py runs the inputs in worker processes, so that a crash or a hang is found and named.
"""
