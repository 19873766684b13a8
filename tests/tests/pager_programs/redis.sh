# redis.sh DIRECTORY KEYS: a server changes its keys while its child saves them. Then another server loads
# the saved keys.
d=$1
cli() { redis-cli -s "$d/socket" "$@"; }
start() {
    redis-server --port 0 --unixsocket "$d/socket" --dir "$d" --save "" --enable-debug-command yes \
        --loglevel warning > "$d/log" 2>&1 &
    server=$!
    until cli ping 2> /dev/null | grep -q PONG; do
        kill -0 $server || { cat "$d/log"; exit 1; }
        sleep 0.02
    done
}
rm -f "$d/dump.rdb"
start
cli debug populate "$2" key 300 > /dev/null
cli debug digest
cli bgsave
for i in 1 2 3; do
    cli eval 'for i=1,500 do redis.call("set","key:"..(i*7),"changed"..i) end' 0 > /dev/null
done
until cli info persistence | grep -q rdb_bgsave_in_progress:0; do sleep 0.02; done
cli info persistence | grep rdb_last_bgsave_status | tr -d '\r'
cli dbsize
cli debug digest
cli shutdown nosave
wait $server
start
cli dbsize
cli debug digest
cli shutdown nosave
wait $server
