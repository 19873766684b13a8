/* Many children, one after the other. Each reads a few pages and ends. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 4000, MOST = 400 };

int main(int count, char **arguments) {
    CHECK(count == 2);
    unsigned children = (unsigned)atoi(arguments[1]);
    CHECK(children <= MOST);
    unsigned *memory = malloc((size_t)PAGES * PAGE);
    for (unsigned i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i;
    for (unsigned c = 0; c < children; c++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (unsigned i = c; i < PAGES; i += MOST)
                CHECK(memory[i * (PAGE / 4)] == i + (i < c ? 1000000 : 0));
            memory[c * (PAGE / 4)] = 0;
            _exit(c % 200);
        }
        /* The child must not see this change. */
        memory[c * (PAGE / 4)] += 1000000;
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status)
            && WEXITSTATUS(status) == (int)(c % 200));
    }
    for (unsigned i = 0; i < PAGES; i++)
        CHECK(memory[i * (PAGE / 4)] == i + (i < children ? 1000000 : 0));
    puts("as expected");
    return 0;
}
