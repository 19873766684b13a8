# mariadb.sh DIRECTORY ROWS: InnoDB with direct I/O; a table, an index, joins and a restart.
d=$1/data s=$1/socket
rm -rf "$d"
mariadb-install-db --no-defaults --user=root --datadir="$d" --auth-root-authentication-method=normal \
    > "$1/install" 2>&1 || { cat "$1/install"; exit 1; }
start() {
    mariadbd --no-defaults --user=root --datadir="$d" --socket="$s" --skip-networking \
        --innodb-flush-method=O_DIRECT --innodb-buffer-pool-size=64M > "$1/log" 2>&1 &
    server=$!
    until mariadb --no-defaults -S "$s" -e 'select 1' > /dev/null 2>&1; do
        kill -0 $server || { cat "$1/log"; exit 1; }
        sleep 0.05
    done
}
sql() { mariadb --no-defaults -N -S "$s" test; }
start "$1"
echo 'create database if not exists test' | mariadb --no-defaults -S "$s"
sql <<END
create table t (i int primary key, k int, v varchar(200), index (k)) engine=innodb;
insert into t select seq, seq * 7919 % 1000003, repeat(char(97 + seq % 26), 20 + seq % 170)
    from seq_1_to_$2;
update t set v = concat(v, 'x') where i % 7 = 0;
checksum table t;
select count(*), sum(a.k), max(length(b.v)) from t a join t b on b.i = a.k;
select i, k from t order by v, k limit 3;
END
mariadb-admin --no-defaults -S "$s" shutdown
wait $server
start "$1"
echo 'checksum table t; check table t;' | sql
mariadb-admin --no-defaults -S "$s" shutdown
wait $server
