// Lets the kernel pin memory. "ring MIB": registers a fixed buffer of io_uring of MIB and keeps it
// until standard input ends. "loop MIB": writes MIB again and again. "peers MIB": two processes
// read each other's MIB by process_vm_readv, at the same time.
#include "check.h"
#include <linux/io_uring.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static char *filled(size_t len, char byte) {
    char *memory = aligned_alloc(4096, len);
    for (size_t at = 0; at < len; at++) memory[at] = byte + at + (at >> 12);
    return memory;
}

static int ring(size_t len) {
    struct io_uring_params params = {0};
    int fd = syscall(SYS_io_uring_setup, 8, &params);
    if (fd < 0) return puts("no ring"), 77;
    struct iovec range = {filled(len, 1), len};
    int failed = syscall(SYS_io_uring_register, fd, IORING_REGISTER_BUFFERS, &range, 1);
    puts(failed ? "refused" : "registered");
    fflush(stdout);
    for (char byte; read(0, &byte, 1) > 0;) {}
    return failed;
}

static int peers(size_t len) {
    int up[2], down[2];
    if (pipe(up) || pipe(down)) return 1;
    pid_t child = fork(), other = child ? child : getppid();
    int *in = child ? up : down, *out = child ? down : up;
    char *mine = filled(len, child ? 1 : 2), *theirs = NULL, *copy = malloc(len);
    write(out[1], &mine, sizeof mine);
    read(in[0], &theirs, sizeof theirs);
    int wrong = 0;
    for (int round = 0; round < 4; round++) {
        struct iovec to = {copy, len}, from = {theirs, len};
        wrong += process_vm_readv(other, &to, 1, &from, 1, 0) != (ssize_t)len;
        for (size_t at = 0; at < len; at += 511)
            wrong += copy[at] != (char)((child ? 2 : 1) + at + (at >> 12));
    }
    write(out[1], &wrong, 1);
    read(in[0], &theirs, 1);
    int status = 0;
    if (child) waitpid(child, &status, 0);
    return wrong != 0 || status != 0;
}

int main(int argc, char **argv) {
    size_t len = argc > 2 ? (size_t)atol(argv[2]) << 20 : 0;
    if (argc > 1 && !strcmp(argv[1], "ring")) return ring(len);
    if (argc > 1 && !strcmp(argv[1], "peers")) return peers(len);
    for (char byte = 3;; byte++) free(filled(len, byte));
}
