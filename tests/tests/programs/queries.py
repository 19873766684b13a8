# DuckDB: a join, groups and a sort, larger than the local memory.
import sys
import duckdb
count = int(sys.argv[1])
db = duckdb.connect(config={"threads": 2})
db.execute(f"create table a as select i, (i * 7919) % 1000003 as k, 'text ' || (i % 997) as t "
           f"from range({count}) r(i)")
db.execute(f"create table b as select i as k, i % 53 as g from range(1000003) r(i)")
print(db.execute("select g, count(*), sum(i), max(t) from a join b using (k) group by g "
                 "order by g").fetchall())
print(db.execute(f"select k, i from a order by t, k, i limit 5 offset {count // 2}").fetchall())
