/* The region in children where the kernel reports no forks. Children of fork(3) and of syscall(2)
 * have all of it, except for the parts with MADV_DONTFORK. Children of an instruction in this
 * program have none of it, and end with a message. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 4000 };
static unsigned *memory;

static int end_of(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
static int has(unsigned page) { return memory[page * (PAGE / 4)] == page + 1 ? 3 : 4; }
static int forked(unsigned page) {
    pid_t child = fork();
    if (child == 0) _exit(has(page));
    return end_of(child);
}
static int by_number(unsigned page) {
    pid_t child = syscall(SYS_fork);
    if (child == 0) _exit(has(page));
    return end_of(child);
}
static int raw(unsigned page) {
    long child;
    __asm__ volatile("syscall" : "=a"(child) : "a"(SYS_fork) : "rcx", "r11", "memory");
    if (child == 0) _exit(has(page));
    return end_of(child);
}
static void all(void) { for (unsigned i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i + 1; }

/* The program's own handlers of SIGSEGV see faults for other reasons. */
static void plain(int number) { _exit(number == SIGSEGV ? 9 : 10); }
static void with_info(int number, siginfo_t *info, void *context) {
    _exit(number == SIGSEGV && context && info->si_addr == 0 ? 11 : 12);
}
static int at_null(void) {
    pid_t child = fork();
    if (child == 0) {
        *(int *volatile)0 = 1;
        _exit(13);
    }
    return end_of(child);
}
static void handlers(void) {
    struct sigaction action = {.sa_sigaction = with_info, .sa_flags = SA_SIGINFO}, before;
    CHECK(signal(SIGSEGV, plain) == SIG_DFL && raw(999) == 118 && at_null() == 9);
    CHECK(!sigaction(SIGSEGV, &action, &before) && before.sa_handler == plain);
    CHECK(before.sa_flags & SA_RESTART && !(before.sa_flags & SA_SIGINFO));
    CHECK(raw(1999) == 118 && at_null() == 11);
    CHECK(!sigaction(SIGSEGV, 0, &before) && before.sa_sigaction == with_info);
    before.sa_handler = SIG_DFL;
    CHECK(!sigaction(SIGSEGV, &before, &before) && before.sa_sigaction == with_info);
    CHECK(at_null() == -SIGSEGV && raw(2999) == 118);
    CHECK(signal(SIGSEGV, SIG_IGN) == SIG_DFL && signal(SIGSEGV, SIG_DFL) == SIG_IGN);
}

int main(void) {
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    all();
    void *part = memory + 1000 * (PAGE / 4);
    for (unsigned page = 0; page < PAGES; page += 999)
        CHECK(raw(page) == 118 && forked(page) == 3 && by_number(page) == 3);
    handlers();
    CHECK(!madvise(part, 100 * PAGE, MADV_DONTFORK));
    CHECK(forked(999) == 3 && forked(1000) == -SIGSEGV && forked(1099) == -SIGSEGV
        && forked(1100) == 3);
    CHECK(!madvise(part, 50 * PAGE, MADV_DOFORK));
    CHECK(forked(1049) == 3 && forked(1050) == -SIGSEGV && raw(1049) == 118);
    /* A later mapping at this address is inherited. */
    CHECK(mmap(part, 100 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
        -1, 0) == part);
    all();
    CHECK(forked(1060) == 3);
    /* Refused: the child would have to see zeros, but paged-out pages would keep their content. */
    CHECK(madvise(part, PAGE, MADV_WIPEONFORK) == -1);
    for (unsigned page = 0; page < PAGES; page++) CHECK(has(page) == 3);
    puts("as expected");
    return 0;
}
