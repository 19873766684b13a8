/* Installs a seccomp filter that allows everything, for all threads ("all") or for this thread
 * ("one"), and uses memory that is larger than the limit. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
int main(int count, char **arguments) {
    CHECK(count == 2);
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {1, &allow};
    size_t size = 32 << 20;
    char *memory = malloc(size);
    memset(memory, 1, size);
    puts("begins");
    fflush(stdout);
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    /* Only asks for the flag, as libseccomp does. */
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, 0) == -1
        && errno == EFAULT);
    if (!strcmp(arguments[1], "all"))
        CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter));
    else CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
    /* All arguments and the error number of other calls arrive. */
    CHECK(syscall(SYS_gettid) == getpid());
    CHECK(syscall(SYS_close, -1) == -1 && errno == EBADF);
    int ends[2];
    CHECK(!pipe(ends) && write(ends[1], "abcdef", 6) == 6);
    long long offset = 0;
    CHECK(syscall(SYS_splice, ends[0], 0, -1, &offset, 6, 0) == -1 && errno == EBADF);
    CHECK(syscall(SYS_pselect6, 0, 0, 0, 0, &(struct { long s, n; }){0, 1000}, 0) == 0);
    for (size_t i = 0; i < size; i += 4096) CHECK(memory[i] == 1);
    puts("ends");
    return 0;
}
