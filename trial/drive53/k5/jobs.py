import json, random, sys
from attn.bench.cases.dense import BenchTable
jobs = []
for table in sys.argv[1:]:
    jobs += [[table, case.name, 0] for case in BenchTable(table).cases]
# Of each table in turn, in a random order: large ones are not side by side.
random.Random(3).shuffle(jobs)
json.dump(jobs, open("/tmp/o/queue.json", "w"))
print(len(jobs), "jobs")
