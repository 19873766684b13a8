/* Daemons: the parent ends at once, by exit, by daemon(3), or by SIGKILL while its child needs its
 * pages. The last process checks all pages. The results go to a pipe of the first process's parent.
 * Usage: daemon double|libc|killed */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 6000 };
static unsigned *memory;
static unsigned *word(size_t page) { return memory + page * (PAGE / 4); }

static void look(const char *who) {
    for (size_t i = 0; i < PAGES; i++)
        if (*word(i) != i + 1 || word(i)[1000] != 0) {
            fprintf(stderr, "%s: page %zu is %u\n", who, i, *word(i));
            _exit(1);
        }
    for (size_t i = 0; i < PAGES; i += 3) *word(i) = i + 7;
    for (size_t i = 0; i < PAGES; i++)
        if (*word(i) != (i % 3 ? i + 1 : i + 7)) _exit(2);
    printf("%s: all there\n", who);
    fflush(stdout);
}

int main(int argc, char **argv) {
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < PAGES; i++) *word(i) = i + 1;
    int ended[2];
    char byte;
    if (argc != 2 || pipe(ended)) return 2;
    if (!strcmp(argv[1], "libc")) {
        if (daemon(1, 1)) return 2;
        look("daemon");
    } else if (!strcmp(argv[1], "double")) {
        if (fork()) return 0;
        setsid();
        if (fork()) _exit(0);
        look("grandchild");
    } else {
        /* The process in the middle is killed after its child has started to read. The child
         * continues after that. */
        pid_t middle = fork();
        if (middle == 0) {
            pid_t middle_pid = getpid();
            if (fork() == 0) {
                close(ended[0]);
                for (size_t i = 0; i < PAGES / 4; i++) if (*word(i) != i + 1) _exit(1);
                kill(middle_pid, SIGKILL);
                while (kill(middle_pid, 0) == 0) usleep(1000);
                look("child of the killed");
                if (write(ended[1], "x", 1) != 1) _exit(3);
                _exit(0);
            }
            pause();
        }
        int status;
        waitpid(middle, &status, 0);
        close(ended[1]);
        printf("killed by %d, %zd byte\n", WTERMSIG(status), read(ended[0], &byte, 1));
    }
    return 0;
}
