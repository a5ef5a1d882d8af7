"""The plan of split KV: which program attends which keys of which request.

Read :mod:`builders.splitkv.record` first: it explains the words of a plan.
"""
