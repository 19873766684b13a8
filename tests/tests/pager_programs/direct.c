// Reads a file with O_DIRECT into a buffer that is much larger than local memory. A second thread
// touches other memory, so that pages are evicted while they are the target of a read.
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { PIECE = 1 << 16, PIECES = 512, HELD = 48, READS = 8000 };

static volatile int done;
static unsigned char *other;
enum { OTHER = 24 << 20 };

static void *press(void *unused) {
    (void)unused;
    uint64_t at = 1;
    while (!done) {
        at = at * 6364136223846793005u + 1442695040888963407u;
        other[(at >> 20) % OTHER] += 1;
    }
    return NULL;
}

static uint64_t stamp(uint64_t word) { return word * 0x9e3779b97f4a7c15u | 1; }

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) return perror("open"), 1;
    uint64_t *piece = malloc(PIECE);
    for (uint64_t i = 0; i < PIECES; i++) {
        for (uint64_t w = 0; w < PIECE / 8; w++) piece[w] = stamp(i * (PIECE / 8) + w);
        if (write(fd, piece, PIECE) != PIECE) return perror("write"), 1;
    }
    fsync(fd);
    close(fd);
    fd = open(argv[1], O_RDONLY | O_DIRECT);
    if (fd < 0) return printf("no O_DIRECT here: %s\n", strerror(errno)), 77;
    struct statfs system;
    if (fstatfs(fd, &system)) return perror("fstatfs"), 1;
    if (system.f_type != EXT4_SUPER_MAGIC && system.f_type != XFS_SUPER_MAGIC &&
        system.f_type != BTRFS_SUPER_MAGIC)
        return printf("file system %#lx: may not pin pages\n", (long)system.f_type), 77;
    int opened = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (fcntl(fd, F_SETFL, 0) || (fcntl(fd, F_GETFL) & O_DIRECT)) return puts("F_SETFL clears"), 1;
    if (fcntl(fd, F_SETFL, O_DIRECT)) return perror("F_SETFL"), 1;
    printf("open %d, set %d\n", opened, (fcntl(fd, F_GETFL) & O_DIRECT) != 0);
    /* For a pipe the flag has another meaning, and is always kept. */
    int ends[2];
    if (pipe(ends) || fcntl(ends[1], F_SETFL, O_DIRECT) || !(fcntl(ends[1], F_GETFL) & O_DIRECT))
        return puts("O_DIRECT of a pipe"), 1;
    unsigned char *buffer;
    if (posix_memalign((void **)&buffer, 4096, (size_t)PIECE * HELD)) return 1;
    other = malloc(OTHER);
    memset(other, 1, OTHER);
    pthread_t thread;
    pthread_create(&thread, NULL, press, NULL);
    uint64_t wrong = 0;
    for (int i = 0; i < READS; i++) {
        int from = (i * 7) % PIECES, to = (i * 5) % HELD;
        unsigned char *target = buffer + (size_t)to * PIECE;
        ssize_t got = pread(fd, target, PIECE, (off_t)from * PIECE);
        if (got != PIECE) return printf("pread: %zd %s\n", got, strerror(errno)), 1;
        uint64_t *words = (uint64_t *)target;
        for (uint64_t w = 0; w < PIECE / 8; w++)
            wrong += words[w] != stamp((uint64_t)from * (PIECE / 8) + w);
    }
    done = 1;
    pthread_join(thread, NULL);
    printf("%llu words are wrong\n", (unsigned long long)wrong);
    return wrong != 0;
}
