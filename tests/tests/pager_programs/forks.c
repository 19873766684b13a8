/* Children see memory as it was at the fork while the parent changes it. They also call fork and
 * exec. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 8192, CHILD_PAGES = 400 };
static unsigned *memory;
static unsigned *word(size_t page) { return memory + page * (PAGE / 4); }

static int wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(void) {
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < PAGES; i++) *word(i) = i + 1;
    int go[2];
    CHECK(!pipe(go));
    pid_t children[3];
    for (int c = 0; c < 3; c++) {
        children[c] = fork();
        if (children[c] == 0) {
            char byte;
            CHECK(read(go[0], &byte, 1) == 1);
            for (size_t i = c; i < PAGES; i += PAGES / CHILD_PAGES) CHECK(*word(i) == i + 1);
            /* Memory that a child drops reads as zero in the child, and is unchanged in other
             * processes. */
            CHECK(!madvise(word(4096), 16 * PAGE, MADV_DONTNEED));
            CHECK(*word(4100) == 0);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                CHECK(*word(4100) == 0 && *word(5001) == 5002);
                execlp("true", "true", (char *)0);
                _exit(127);
            }
            CHECK(wait_for(grandchild) == 0);
            _exit(10 + c);
        }
    }
    /* Overwrites and drops everything before the children read. */
    for (size_t i = 0; i < PAGES; i += 2) *word(i) = 77;
    CHECK(!munmap(word(PAGES / 2), PAGES / 4 * PAGE));
    for (size_t i = 0; i < PAGES / 2; i++) *word(i) = 78;
    CHECK(write(go[1], "abc", 3) == 3);
    for (int c = 0; c < 3; c++) CHECK(wait_for(children[c]) == 10 + c);
    for (size_t i = 0; i < PAGES / 2; i++) CHECK(*word(i) == 78);
    FILE *pipe_end = popen("echo $(echo a | cat)", "r");
    char text[16] = "";
    CHECK(pipe_end && fgets(text, sizeof text, pipe_end) && !strcmp(text, "a\n"));
    CHECK(pclose(pipe_end) == 0 && system("exit 4") == 4 << 8);
    puts("as expected");
    return 0;
}
