/* A child reads many pages in a second thread, and meanwhile its main thread forks again and again.
 * So some grandchildren start after the child has reached the number of pages that the page server
 * gives to a process without a pager of its own, and before the child has its own pager. Each
 * grandchild checks pages that the child has not read. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 8192, WORDS = 512, ROUNDS = 20, FEW = 40, MANY = 600, FORKS = 40 };
static uint64_t *memory;
static atomic_int progress;

static void *read_pages(void *unused) {
    uint64_t bad = 0;
    for (int page = 0; page < MANY; page++) {
        bad += memory[(size_t)page * WORDS] != (uint64_t)page * 7 + 1;
        progress = page + 1;
    }
    return (void *)bad;
}

static int grandchild(void) {
    alarm(30);
    for (int page = PAGES / 2; page < PAGES / 2 + 8; page++)
        if (memory[(size_t)page * WORDS] != (uint64_t)page * 7 + 1) return 1;
    return 0;
}

static int child(void) {
    pthread_t reader;
    pid_t processes[FORKS];
    int status, failed = 0, forks = 0;
    void *bad;
    if (pthread_create(&reader, NULL, read_pages, NULL)) return 2;
    while (progress < FEW) {
    }
    while (forks < FORKS && progress < MANY) {
        pid_t process = fork();
        if (process == 0) _exit(grandchild());
        if (process < 0) return 2;
        processes[forks++] = process;
    }
    while (forks > 0) {
        if (waitpid(processes[--forks], &status, 0) < 0) return 2;
        failed |= status != 0;
    }
    pthread_join(reader, &bad);
    return failed || bad;
}

int main(void) {
    int status, failed = 0;
    memory = mmap(NULL, (size_t)PAGES * WORDS * 8, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (int page = 0; page < PAGES; page++) memory[(size_t)page * WORDS] = (uint64_t)page * 7 + 1;
    for (int round = 0; round < ROUNDS && !failed; round++) {
        pid_t process = fork();
        if (process == 0) _exit(child());
        if (process < 0 || waitpid(process, &status, 0) != process) return 2;
        failed |= status != 0;
    }
    puts(failed ? "a grandchild has lost pages or hangs" : "all grandchildren have their pages");
    return failed;
}
