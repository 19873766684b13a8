# repack.sh DIRECTORY FILES: packs a repository with a history of changes from nothing.
r=$1/repository
rm -rf "$r"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
git init -q "$r" && cd "$r" || exit 1
git config pack.threads 1
git config gc.auto 0
for c in 1 2 3; do
    i=0
    while [ $i -lt "$2" ]; do
        seq $((i * c)) $((i * c + 3000 + i)) > "f$i"
        i=$((i + 1))
    done
    seq 1 $((300000 + c)) > big
    git add -A && git commit -q -m "$c"
done
git repack -q -a -d -f --depth=50 --window=50
git fsck --full 2>&1
git rev-parse HEAD
cat .git/objects/pack/*.pack | sha256sum
