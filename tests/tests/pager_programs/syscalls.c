/* System calls that read and write paged buffers. argv[1] is a file to use. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { SIZE = 24 << 20 };

int main(int argc, char **argv) {
    unsigned char *a = malloc(SIZE), *b = calloc(1, SIZE);
    CHECK(argc == 2 && a && b);
    for (size_t i = 0; i < SIZE; i++) a[i] = i * 2654435761u >> 13;
    int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(write(fd, a, SIZE) == SIZE);
    CHECK(pread(fd, b, SIZE, 0) == SIZE);
    CHECK(!memcmp(a, b, SIZE));
    memset(b, 0, SIZE);
    struct iovec parts[64];
    for (int i = 0; i < 64; i++) parts[i] = (struct iovec){b + (63 - i) * (SIZE / 64), SIZE / 64};
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, parts, 64) == SIZE);
    for (int i = 0; i < 64; i++) CHECK(!memcmp(parts[i].iov_base, a + i * (SIZE / 64), SIZE / 64));
    /* A read into untouched memory, with a path and a structure in paged memory. */
    unsigned char *fresh = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
        0);
    CHECK(pread(fd, fresh, SIZE, 0) == SIZE && !memcmp(fresh, a, SIZE));
    char *path = malloc(4096);
    struct stat *status = malloc(sizeof *status);
    strcpy(path, argv[1]);
    memset(a, 1, SIZE); /* evicts them */
    CHECK(stat(path, status) == 0 && status->st_size == SIZE);
    /* Through a socket to a child and back. */
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    int inherited = pair[1];
    pid_t child = fork();
    if (child == 0) {
        dup2(inherited, 0);
        dup2(inherited, 1);
        execlp("cat", "cat", (char *)0);
        _exit(127);
    }
    close(pair[1]);
    size_t sent = 0, got = 0;
    memset(b, 0, SIZE);
    while (got < SIZE / 4) {
        struct pollfd wait = {pair[0], POLLIN | (sent < SIZE / 4 ? POLLOUT : 0), 0};
        CHECK(poll(&wait, 1, 10000) == 1);
        if (wait.revents & POLLOUT) {
            ssize_t n = send(pair[0], fresh + sent, SIZE / 4 - sent, MSG_DONTWAIT);
            if (n > 0) sent += n;
            if (sent == SIZE / 4) shutdown(pair[0], SHUT_WR);
        }
        if (wait.revents & POLLIN) {
            ssize_t n = recv(pair[0], b + got, SIZE / 4 - got, 0);
            CHECK(n > 0);
            got += n;
        }
    }
    CHECK(!memcmp(b, fresh, SIZE / 4));
    int ended;
    CHECK(waitpid(child, &ended, 0) == child && ended == 0);
    /* The pager's descriptors stay open if the program closes all others. */
    for (int i = 3; i < 2048; i++) close(i);
    close_range(3, ~0u, 0);
    memset(a, 7, SIZE);
    for (size_t i = 0; i < SIZE / 4; i += 512) CHECK(b[i] == fresh[i]);
    puts("as expected");
    return 0;
}
