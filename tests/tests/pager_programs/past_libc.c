/* Children that are made past libc's fork see the memory of their parent, and fork by libc in turn.
 * Usage: past_libc WAY. With "unknown", the child is made by an instruction in this program, and
 * its own child by libc. With "greedy", such a child reads all pages. */
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, PAGES = 4000, MORE = 3000 };
static unsigned char *memory;

static void look(int step) {
    for (int page = 0; page < PAGES; page += step)
        for (int at = 0; at < PAGE; at += 509)
            CHECK(memory[page * PAGE + at] == block_byte(page * PAGE + at, 1));
}

/* More memory than the bound, in a child that has a pager. */
static void fill_more(void) {
    unsigned char *more = malloc(MORE * PAGE);
    CHECK(more);
    fill_block(more, MORE * PAGE, 2);
    check_block(more, MORE * PAGE, 2);
    free(more);
}

static int known(void *unused) {
    (void)unused;
    look(1);
    fill_more();
    pid_t grandchild = fork();
    if (grandchild == 0) {
        look(1);
        fill_more();
        _exit(5);
    }
    check_child(grandchild, 5);
    look(7);
    return 6;
}

/* Has no pager: its mappings are not paged, and the keeper serves at most as many pages as the
 * bound has. */
static int unknown(void) {
    look(7);
    int access = PROT_READ | PROT_WRITE;
    unsigned char *mapped = mmap(0, 64 * PAGE, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    fill_block(mapped, 64 * PAGE, 3);
    check_block(mapped, 64 * PAGE, 3);
    CHECK(!munmap(mapped, 64 * PAGE));
    CHECK(!mprotect(memory, 16 * PAGE, PROT_READ) && memory[1] == block_byte(1, 1));
    CHECK(!munmap(memory + (PAGES - 100) * PAGE, 100 * PAGE));
    /* Drops pages within malloc's memory, which read as zeros then. */
    for (int round = 0; round < 20; round++) {
        char *block = malloc(256 * 1024);
        CHECK(block);
        memset(block, 1, 256 * 1024);
        free(block);
    }
    char *pages = aligned_alloc(PAGE, 32 * PAGE);
    memset(pages, 1, 32 * PAGE);
    CHECK(!madvise(pages, 32 * PAGE, MADV_DONTNEED));
    for (int at = 0; at < 32 * PAGE; at++) CHECK(pages[at] == 0);
    pid_t grandchild = fork();
    if (grandchild == 0) {
        CHECK(memory[5] == block_byte(5, 1));
        exit(5);
    }
    check_child(grandchild, 5);
    exit(6);
}

static long by_instruction(long number, long flags) {
    long result;
    register long fourth __asm__("r10") = 0, fifth __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(flags), "S"(0), "d"(0), "r"(fourth), "r"(fifth)
                     : "rcx", "r11", "memory");
    return result;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *way = arguments[1];
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    fill_block(memory, PAGES * PAGE, 1);
    for (int round = 0; round < 3; round++) {
        long child = -1;
        if (!strcmp(way, "fork")) child = syscall(SYS_fork);
        if (!strcmp(way, "clone")) child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (!strcmp(way, "namespace"))
            child = syscall(SYS_clone, SIGCHLD | CLONE_NEWPID | CLONE_NEWNS, 0, 0, 0, 0);
        if (!strcmp(way, "clone3")) {
            struct clone_args *how = calloc(1, sizeof *how);
            int *id = calloc(1, sizeof *id);
            how->flags = CLONE_CHILD_SETTID;
            how->exit_signal = SIGCHLD;
            how->child_tid = (unsigned long)id;
            child = syscall(SYS_clone3, how, sizeof *how);
            if (child == 0) CHECK(*id == getpid());
            CHECK(child == 0 || *id == 0);
        }
        if (!strcmp(way, "_Fork")) child = _Fork();
        if (!strcmp(way, "function")) {
            char *stack = malloc(1 << 20);
            child = clone(known, stack + (1 << 20), SIGCHLD, 0);
        }
        int is_greedy = !strcmp(way, "greedy"), is_unknown = !strcmp(way, "unknown");
        if (is_greedy || is_unknown) child = by_instruction(SYS_clone, SIGCHLD);
        if (child == 0 && is_greedy) {
            look(1);
            _exit(6);
        }
        if (child == 0) _exit(is_unknown ? unknown() : known(0));
        CHECK(child > 0);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        int ended = WIFEXITED(status);
        printf("%d %d\n", ended, ended ? WEXITSTATUS(status) : WTERMSIG(status));
        fflush(stdout);
        look(1);
    }
    /* Errors are those of the kernel. */
    CHECK(syscall(SYS_clone, CLONE_SIGHAND, 0, 0, 0, 0) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_clone3, 0, 0) == -1 && errno == EINVAL);
    look(1);
    return 0;
}
