# postgresql.sh DIRECTORY ROWS PROGRAMS: sorts and hashes in memory, in parallel. PROGRAMS is the directory
# of the server's programs.
d=$1/data PATH=$3:$PATH
rm -rf "$d"
cd "$1" || exit 1
export PGHOST=$d PGUSER=postgres PGDATABASE=postgres
initdb -D "$d" -U postgres --no-sync -E UTF8 --locale=C > "$d.log" 2>&1 || { cat "$d.log"; exit 1; }
pg_ctl -D "$d" -s -w -l "$d/log" start -o "-k $d -c listen_addresses= -c shared_buffers=16MB \
    -c fsync=off -c max_parallel_workers_per_gather=2 -c work_mem=256MB" || { cat "$d/log"; exit 1; }
psql -qAt <<END
create table t as select i, i * 7919::bigint % 1000003 as k, repeat(chr(97 + i % 26), 20 + i % 80) as v
    from generate_series(1, $2) i;
analyze t;
select count(*), sum(i), min(v) from (select * from t order by v, k offset 10) s;
select k % 10 as g, count(*), sum(i), max(v) from t group by g order by g;
select count(*), sum(a.i) from t a join t b on a.k = b.i;
END
pg_ctl -D "$d" -s -w -m fast stop
