/* Different ways to create a process, with atfork handlers, a signal handler that forks, many
 * children, setuid, vfork and posix_spawn, limits, and an alternate stack in paged memory. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 6000 };
extern char **environ;
static unsigned *memory;
static unsigned *word(size_t page) { return memory + page * (PAGE / 4); }

static int wait_for(pid_t child) {
    int status;
    pid_t got;
    while ((got = waitpid(child, &status, 0)) < 0);
    CHECK(got == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
static void look(size_t step) { for (size_t i = 0; i < PAGES; i += step) CHECK(*word(i) == i + 1); }

static int before, in_parent, in_child;
static void count_before(void) { before++; look(997); }
static void count_parent(void) { in_parent++; look(997); }
static void count_child(void) { in_child++; look(997); }

static volatile pid_t forked_in_handler;
static void fork_in_handler(int signal) {
    (void)signal;
    pid_t child = fork();
    if (child == 0) { look(13); _exit(31); }
    forked_in_handler = child;
}

static sigjmp_buf back;
static volatile int faults;
static void segv(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)context;
    char local[8192];
    memset(local, 1, sizeof local);
    faults += local[100] + (info->si_addr == (void *)64);
    siglongjmp(back, 1);
}

static atomic_int stop, ticks, reaped;
static void tick(int signal) { (void)signal; ticks++; look(499); }
static void reap(int signal) { (void)signal; reaped++; }
static void *hammer(void *from) {
    for (size_t i = (size_t)from; !stop; i = (i * 5 + 1) % PAGES) CHECK(*word(i) == i + 1);
    return 0;
}

int main(void) {
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < PAGES; i++) *word(i) = i + 1;

    pthread_atfork(count_before, count_parent, count_child);
    pid_t child = fork();
    if (child == 0) { CHECK(before == 1 && in_parent == 0 && in_child == 1); _exit(9); }
    CHECK(wait_for(child) == 9 && before == 1 && in_parent == 1 && in_child == 0);

    /* A signal handler forks while another thread has page faults. */
    pthread_t threads[3];
    for (size_t t = 0; t < 3; t++) pthread_create(&threads[t], 0, hammer, (void *)(t * 17));
    signal(SIGUSR1, fork_in_handler);
    for (int i = 0; i < 3; i++) {
        raise(SIGUSR1);
        CHECK(wait_for(forked_in_handler) == 31);
    }
    stop = 1;
    for (int t = 0; t < 3; t++) pthread_join(threads[t], 0);

    /* Many children at the same time. Most touch a few pages, some touch all. */
    enum { MANY = 60 };
    pid_t many[MANY];
    for (int c = 0; c < MANY; c++) {
        many[c] = fork();
        CHECK(many[c] >= 0);
        if (many[c] == 0) {
            look(c % 20 ? 501 : 1);
            *word(c) = 0;
            CHECK(*word(c + 1) == c + 2u);
            _exit(c);
        }
    }
    for (int c = 0; c < MANY; c++) CHECK(wait_for(many[c]) == c);
    look(1);

    child = vfork();
    if (child == 0) { execlp("true", "true", (char *)0); _exit(127); }
    CHECK(wait_for(child) == 0);
    char *arguments[] = {"sh", "-c", "exit 5", 0};
    CHECK(posix_spawnp(&child, "sh", 0, 0, arguments, environ) == 0 && wait_for(child) == 5);
    FILE *pipe_end = popen("echo $(echo a | cat)", "r");
    char text[16] = "";
    CHECK(pipe_end && fgets(text, sizeof text, pipe_end) && !strcmp(text, "a\n")
        && pclose(pipe_end) == 0);

    /* A signal handler of the program runs on a stack in paged memory. */
    char *stack = malloc(1 << 20);
    stack_t alternate = {.ss_sp = stack, .ss_size = 1 << 20};
    CHECK(sigaltstack(&alternate, 0) == 0);
    struct sigaction action = {.sa_sigaction = segv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, 0);
    for (int i = 0; i < 3; i++) {
        look(1);
        if (!sigsetjmp(back, 1)) *(volatile int *)64 = 1;
    }
    CHECK(faults == 6);

    /* Timers expire and children end while system calls wait for paged buffers. */
    struct sigaction timer = {.sa_handler = tick, .sa_flags = SA_RESTART},
        chld = {.sa_handler = reap, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &timer, 0);
    sigaction(SIGCHLD, &chld, 0);
    struct itimerval often = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    int ends[2];
    CHECK(!pipe(ends));
    setitimer(ITIMER_REAL, &often, 0);
    child = fork();
    if (child == 0) {
        setitimer(ITIMER_REAL, &never, 0);
        for (size_t i = 0; i < PAGES; i += 16) CHECK(write(ends[1], word(i), 4096) == 4096);
        _exit(0);
    }
    char *copy = malloc(4096 * 64);
    for (size_t i = 0; i < PAGES; i += 16) {
        char *at = copy + i / 16 % 64 * 4096;
        for (size_t got = 0; got < 4096;) {
            ssize_t more = read(ends[0], at + got, 4096 - got);
            CHECK(more > 0);
            got += more;
        }
        CHECK(*(unsigned *)at == i + 1);
    }
    while (ticks < 3) pause();
    setitimer(ITIMER_REAL, &never, 0);
    CHECK(wait_for(child) == 0 && reaped > 0);

    /* Limits. */
    struct rlimit files = {40, 40}, data;
    child = fork();
    if (child == 0) {
        CHECK(!setrlimit(RLIMIT_NOFILE, &files) && !getrlimit(RLIMIT_DATA, &data));
        look(1);
        pid_t grandchild = fork();
        if (grandchild == 0) { look(1); _exit(3); }
        _exit(wait_for(grandchild));
    }
    CHECK(wait_for(child) == 3);

    /* Change of user: libc changes the user of all its threads. */
    if (geteuid() == 0) {
        child = fork();
        if (child == 0) {
            CHECK(!setgid(65534) && !setuid(65534));
            look(1);
            _exit(geteuid() == 65534 ? 4 : 5);
        }
        CHECK(wait_for(child) == 4);
        CHECK(!setgid(65534) && !setuid(65534));
        look(1);
    }
    puts("as expected");
    return 0;
}
