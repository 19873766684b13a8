# Subshells, pipes and substitutions over a large variable.
x=$(seq 1 "$1")
n=0
for i in 1 2 3 4 5; do
    n=$((n + $(echo "$x" | head -$i | wc -l)))
    ( y="$x$i"; echo ${#y}; ( echo sub ${#x} ) )
done
f() { echo "$x" | tail -20 | (while read a; do b=$a; done; echo last $b); echo "$x" | tail -1; }
z=$(f)
echo "$z" $n
echo "$x" | sort -r | sed -n 5p
cat <<EOT | cksum
$x
EOT
