/* Pipes and sockets that could reference paged memory. argv[1] is "libc" or "raw", the way to make
 * the calls; argv[2] is a path for a FIFO. Prints the errno of SO_ZEROCOPY, 0 for success. */
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "check.h"

enum { SIZE = 32 << 20, PIPE = 1 << 16, PIECE = 4096 };

static int raw;
static unsigned char *block, *other;

static ssize_t splice_from(int fd, void *from, size_t len, unsigned flags) {
    /* Two ranges, the second one empty. */
    struct iovec *ranges = malloc(2 * sizeof *ranges);
    ranges[0] = (struct iovec){from, len}, ranges[1] = (struct iovec){from, 0};
    ssize_t done = raw ? syscall(SYS_vmsplice, fd, ranges, 2ul, flags)
                       : vmsplice(fd, ranges, 2, flags);
    int error = errno;
    free(ranges);
    errno = error;
    return done;
}

/* Takes all other pages out of memory, and uses their memory again. */
static void press(int round) {
    for (int pass = 0; pass < 2; pass++)
        for (size_t at = 0; at < SIZE; at += 64)
            other[at] = (unsigned char)(at / 64 + round + pass);
}

static void read_back(int fd, const unsigned char *expected, size_t len) {
    static unsigned char got[PIPE];
    for (size_t at = 0; at < len;) {
        ssize_t n = read(fd, got, len - at < PIPE ? len - at : PIPE);
        CHECK(n > 0 && !memcmp(got, expected + at, n));
        at += n;
    }
}

static void check_content(const unsigned char *copy) {
    int ends[2];
    CHECK(!pipe(ends));
    for (int round = 0; round < 4; round++) {
        unsigned char *from = block + (size_t)round * PIPE;
        CHECK(splice_from(ends[1], from, PIPE, round & 1 ? SPLICE_F_GIFT : 0) == PIPE);
        press(round);
        read_back(ends[0], copy + (size_t)round * PIPE, PIPE);
    }
    close(ends[0]), close(ends[1]);
}

static void *read_piece(void *fd) {
    unsigned char piece[PIECE];
    struct pollfd wait = {*(int *)fd, POLLIN, 0};
    CHECK(poll(&wait, 1, -1) == 1 && read(*(int *)fd, piece, PIECE) == PIECE);
    return NULL;
}

/* The values that the kernel returns, for a pipe or a FIFO. */
static void check_values(int in, int out) {
    unsigned char *from = block + 7 * PIECE;
    CHECK(splice_from(out, from, 0, 0) == 0);
    /* More than the pipe holds: the call returns when the pipe is full. */
    CHECK(splice_from(out, from, 4 * PIPE, 0) == PIPE);
    CHECK(splice_from(out, from, PIECE, SPLICE_F_NONBLOCK) == -1 && errno == EAGAIN);
    for (int nonblocking = 0; nonblocking < 2; nonblocking++) {
        CHECK(!fcntl(out, F_SETFL, nonblocking ? O_NONBLOCK : 0));
        pthread_t reader;
        CHECK(!pthread_create(&reader, NULL, read_piece, &in));
        CHECK(splice_from(out, from, PIECE, 0) == PIECE);
        CHECK(!pthread_join(reader, NULL));
    }
    unsigned char *to = other + 3 * PIECE;
    memset(to, 0, PIPE);
    /* From the pipe into memory. */
    for (size_t at = 0; at < PIPE;) {
        ssize_t n = splice_from(in, to + at, PIPE - at, 0);
        CHECK(n > 0);
        at += n;
    }
    CHECK(!memcmp(to, from + 2 * PIECE, PIPE - 2 * PIECE));
    CHECK(splice_from(in, to, PIECE, SPLICE_F_NONBLOCK) == -1 && errno == EAGAIN);
    CHECK(splice_from(out, from, PIECE, SPLICE_F_NONBLOCK) == PIECE);
    CHECK(splice_from(out, from, PIECE, 64) == -1 && errno == EINVAL);
    CHECK(!close(in));
    CHECK(splice_from(out, from, PIECE, 0) == -1 && errno == EPIPE);
    CHECK(!close(out));
    CHECK(splice_from(out, from, PIECE, 0) == -1 && errno == EBADF);
}

static void check_zero_copy(const unsigned char *copy) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof name;
    int server = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(!bind(server, (struct sockaddr *)&name, len) && !listen(server, 1));
    CHECK(!getsockname(server, (struct sockaddr *)&name, &len));
    long set = raw ? syscall(SYS_setsockopt, client, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one)
                   : setsockopt(client, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one);
    printf("SO_ZEROCOPY: %d\n", set ? errno : 0);
    set = raw ? syscall(SYS_setsockopt, client, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one)
              : setsockopt(client, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    len = sizeof one, one = 0;
    CHECK(!set && !getsockopt(client, SOL_SOCKET, SO_KEEPALIVE, &one, &len) && one == 1);
    len = sizeof name;
    CHECK(!connect(client, (struct sockaddr *)&name, len));
    int accepted = accept(server, NULL, NULL);
    CHECK(send(client, block, PIECE, MSG_ZEROCOPY) == PIECE);
    press(9);
    read_back(accepted, copy, PIECE);
    close(server), close(client), close(accepted);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    raw = !strcmp(argv[1], "raw");
    signal(SIGPIPE, SIG_IGN);
    block = aligned_alloc(PIECE, SIZE), other = aligned_alloc(PIECE, SIZE);
    for (size_t at = 0; at < SIZE; at++) block[at] = (unsigned char)(at * 2654435761u >> 13);
    /* A copy that is not paged. */
    unsigned char *copy = mmap(NULL, 4 * PIPE, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memcpy(copy, block, 4 * PIPE);
    check_content(copy);
    int ends[2];
    CHECK(!pipe(ends));
    check_values(ends[0], ends[1]);
    CHECK(!mkfifo(argv[2], 0600));
    int in = open(argv[2], O_RDONLY | O_NONBLOCK), out = open(argv[2], O_WRONLY);
    CHECK(!unlink(argv[2]) && in >= 0 && out >= 0 && !fcntl(in, F_SETFL, 0));
    check_values(in, out);
    check_zero_copy(copy);
    puts("as expected");
    return 0;
}
